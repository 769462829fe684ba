"""Options of the evaluation commands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol

from annotated_types import Ge, Le, Lt
from tyro.conf import Positional

from sit_vit5.config.fields import (
    MOST_BLOCKS,
    BatchSize,
    EndDistance,
    FilePath,
    Fraction,
    GuidanceScale,
    ImageSize,
    NumImages,
    Seed,
    SolverSteps,
    Tolerance,
    Workers,
    check_values,
)
from sit_vit5.config.sampling import (
    GenerateConfig,
    GuidanceConfig,
    SamplerConfig,
    check_interval,
    check_sampler,
)
from sit_vit5.config.training import CodecConfig
from sit_vit5.utils.errors import UserError


@dataclass(frozen=True, kw_only=True)
class RealDataConfig:
    """How a data set is read that training could read."""

    source: str | None = None
    """As --data.source of train_sit.py; None: what lies at the path."""
    split: str | None = None
    """As --data.split of train_sit.py; None: train."""
    image_column: str | None = None
    """As --data.image-column of train_sit.py."""
    label_column: str | None = None
    """As --data.label-column of train_sit.py."""
    workers: Workers = 4
    """Processes that decode images; 0: none."""


@dataclass(frozen=True, kw_only=True)
class RealImagesConfig(RealDataConfig):
    """Real images, read as training reads them: the same sources, the same crop, never mirrored."""

    image_size: ImageSize = 256
    """Side of the images in pixels (ADM centre crop)."""
    unconditional: bool = False
    """Ignore the classes: a folder needs no sub-folders."""
    on_bad_image: Literal["error", "skip"] = "error"
    """A file that cannot be decoded stops the command, or is left out and counted."""
    features: str = "inception"
    """inception (torch-fidelity's InceptionV3), dinov2, timm:NAME or pixels."""
    weights: FilePath | None = None
    """File of the features' network, instead of its library's cache."""
    inception_weights: FilePath | None = None
    """The same, under the name that Inception's weights have in the other commands."""
    batch_size: BatchSize = 64
    """Images per feature batch; the result depends on it only by rounding."""


class HasWeights(Protocol):
    """Options that name an extractor and its weights."""

    features: str
    weights: str | None
    inception_weights: str | None


def check_weights(config: HasWeights) -> None:
    """Refuses two files of weights, and Inception's for other features."""
    if config.weights and config.inception_weights:
        raise UserError("weights and inception_weights are the same option; give one of them")
    if config.inception_weights and config.features != "inception":
        raise UserError(f"inception_weights has no use with features {config.features}; drop it")


@dataclass(frozen=True, kw_only=True)
class MakeReferenceConfig(RealImagesConfig):
    """Make a reference of a data set: statistics of all images, and some of the images."""

    data: Positional[FilePath]
    """Data set as --data.path of train_sit.py takes it, or digits:train, digits:held-out."""
    out: FilePath
    """Reference to write, an npz; a begun one is completed."""
    num_images_kept: NumImages = 10_000
    """Images kept for precision, recall and KID, drawn at random; all, if there are fewer."""
    seed: Seed = 0
    """Of the choice of the images that are kept."""

    def __post_init__(self) -> None:
        check_values(self)
        check_weights(self)
        if not self.out.endswith(".npz"):
            raise UserError(f"out {self.out} must end in .npz")


@dataclass(frozen=True)
class InspectReferenceConfig:
    """Say what is in a reference, a sample set or any other set of images, and check it."""

    file: Positional[FilePath]
    """npz, .npy, folder or zip archive of images."""


# Word after evaluate/reference.py -> its options.
REFERENCE_COMMANDS: dict[str, type] = {
    "make": MakeReferenceConfig,
    "inspect": InspectReferenceConfig,
}


@dataclass(frozen=True, kw_only=True)
class ReconstructionConfig(RealImagesConfig):
    """Encode and decode images with a codec: rFID, PSNR, SSIM and LPIPS against the originals."""

    data: FilePath
    """Data set as --data.path of train_sit.py takes it, mostly validation images; or digits:train,
    digits:held-out."""
    out: FilePath
    """Folder to write reconstruction.json and reconstruction.png to."""
    posterior: Literal["mode", "sample"] = "mode"
    """Decode the posterior's mean, or a draw of it as training sees it."""
    num_images: Annotated[int, Ge(0), Le(10**8)] = 0
    """Images, drawn from the data by the seed; 0: all."""
    seed: Seed = 0
    """Of the choice of images; the posterior's draws are those of (seed, image)."""
    lpips: Literal["alex", "vgg", "squeeze"] = "alex"
    """Network that LPIPS is built on; papers on autoencoders use alex or vgg, and rarely say."""
    lpips_weights: FilePath | None = None
    """File of torchvision's ImageNet weights of that network, instead of torch's cache."""
    columns: Annotated[int, Ge(1), Le(1000)] = 8
    """Images in the picture."""
    codec: CodecConfig = CodecConfig()

    def __post_init__(self) -> None:
        check_values(self)
        check_weights(self)


@dataclass(frozen=True)
class ReportConfig:
    """The page that shows an evaluation: one file, without a script or a network."""

    write: bool = True
    """Write it."""
    out: FilePath | None = None
    """HTML to write; None: beside the JSON, report.html for metrics.json."""
    images: Annotated[int, Ge(1), Le(10_000)] = 36
    """Samples in its grid, drawn at random by the seed."""


@dataclass(frozen=True)
class MetricsConfig:
    """Compare a set of samples with a reference."""

    samples: Positional[FilePath]
    """samples.npz (arr_0, uint8, N H W C), a folder or zip of images, or a built-in set."""
    reference: FilePath
    """npz (arr_0, or mu and sigma, or all), a folder or zip of images, or a built-in set:
    digits:held-out."""
    metrics: tuple[str, ...] = ()
    """fid, sfid, is, precision_recall, kid; none given: all that features and reference allow."""
    features: str = "inception"
    """inception (torch-fidelity's InceptionV3), dinov2, timm:NAME (any model of timm), pixels."""
    floor: FilePath | None = None
    """A second real set compared with the reference: what a perfect model would score."""
    agreement: str | None = None
    """Labelled built-in set; reports how many samples its classifier assigns to the asked class."""
    classes: FilePath | None = None
    """Labelled real images for distances per class, as --data.path of train_sit.py takes them;
    None: the reference's own images, where they have labels."""
    neighbours: FilePath | None = None
    """Training images, as --data.path of train_sit.py takes them, a reference or digits:train: are
    samples copies of them? One pass over all of them."""
    weights: FilePath | None = None
    """File of the features' network, instead of its library's cache."""
    inception_weights: FilePath | None = None
    """The same, under the name that Inception's weights have in the other commands."""
    batch_size: BatchSize = 64
    """Images per feature batch; changes a network's features in their last bits only."""
    bootstrap: Annotated[int, Ge(0), Le(10**6)] = 0
    """Resamples for a 95% interval of fid, such as 20; about 10 s each for 50,000 images on two
    cores. 0: none."""
    extrapolate: bool = False
    """Also fid at infinitely many samples (Chong & Forsyth, 2020)."""
    selftest: bool = False
    """Also check the installation: the reference against itself, and one image in two batches."""
    keep_features: bool = True
    """Keep a network's features on the disk: another metric of the same images needs no pass."""
    cache: FilePath | None = None
    """Folder of kept features; None: ~/.cache/sit_vit5/features."""
    cache_gigabytes: Annotated[float, Ge(0), Le(1e9)] = 10.0
    """Largest size of that folder in 10^9 bytes; features unused for longest are removed."""
    seed: Seed = 0
    """Of the choice of images that are shown, and of those whose neighbours are sought."""
    out: FilePath | None = None
    """JSON to write; None: metrics.json beside the samples."""
    report: ReportConfig = ReportConfig()
    real: RealDataConfig = RealDataConfig()

    def __post_init__(self) -> None:
        check_metrics(self)


@dataclass(frozen=True, kw_only=True)
class SweepConfig(GenerateConfig):
    """Rank guidance scales, guidance intervals and averages on a few samples of each."""

    reference: FilePath
    """npz (arr_0, or mu and sigma), a folder of images, or a built-in set: digits:held-out."""
    scales: tuple[GuidanceScale, ...] = (1.0, 1.5, 2.0, 3.0)
    """Guidance scales; 1 is off and runs once, whatever the intervals."""
    intervals: tuple[str, ...] = ("0,1",)
    """Guidance intervals LOW,HIGH such as 0,1 0.3,1, in guidance.interval_unit."""
    weights: tuple[str, ...] = ()
    """raw, ema (the slowest average), ema_DECAY or ema_width_WIDTH; none given: every average."""
    num_samples: NumImages = 500
    """Images per cell; all cells share noise and labels."""
    features: str = "inception"
    """inception (torch-fidelity's InceptionV3), dinov2, timm:NAME (any model of timm), pixels."""
    agreement: str | None = None
    """Labelled built-in set (digits): also the share of samples classified as asked."""
    inception_weights: FilePath | None = None
    """File of the features' network, Inception or another, instead of its library's cache."""
    out: FilePath | None = None
    """Folder to write to; None: samples/sweep_STEP_N in the run folder."""

    def __post_init__(self) -> None:
        check_sweep(self)


@dataclass(frozen=True)
class LikelihoodConfig:
    """Log-likelihood of images under the model's ODE."""

    checkpoint: FilePath
    """Checkpoint folder, a run folder, or its file `latest`."""
    data: FilePath
    """Built-in set (digits:held-out, digits:train), or images as --data.path of train_sit.py takes
    them: a folder with a sub-folder per class, an npz, ..."""
    weights: str = "ema"
    """raw, ema (the slowest average), ema_DECAY such as ema_0.9999, or ema_width_WIDTH."""
    num_images: Annotated[int, Ge(0), Le(10**8)] = 64
    """Images, drawn from the data by the seed; 0: all."""
    method: Literal[
        "dopri5", "dopri8", "bosh3", "adaptive_heun", "fehlberg2",
        "euler", "midpoint", "heun", "heun3", "rk4",
    ] = "dopri5"  # fmt: skip
    """ODE solver: with steps of its own choice, or on a fixed grid (from euler on)."""
    steps: SolverSteps | None = None
    """Integration intervals of a fixed grid; None: 50."""
    atol: Tolerance | None = None
    """Absolute tolerance of an adaptive method; None: 1e-6."""
    rtol: Tolerance | None = None
    """Relative tolerance of an adaptive method; None: 1e-3."""
    eps: EndDistance | None = None
    """Distance in t from an end where the prediction is singular; None: SiT's, 1e-3."""
    probes: Annotated[int, Ge(1), Le(10**6)] = 1
    """Random sign vectors per image that estimate the divergence; the cost is in proportion."""
    dequantize: Literal["uniform", "none"] | None = None
    """Uniform noise of one grey level on the pixels, or none; None: uniform for models of pixels,
    none for models of latents."""
    null_label: bool = False
    """Likelihood without the class, by the null label, instead of given each image's class."""
    batch_size: BatchSize = 64
    """Images per network call and process."""
    precision: Literal["bf16", "fp32"] = "fp32"
    """Precision of matrix products; the solver's state is fp32."""
    attention: Literal["fused", "fp32_math"] = "fused"
    """Fused kernels, or softmax(q k) v written out in fp32, to compare with."""
    seed: Seed = 0
    """Of the choice of images; probes and dequantisation are those of (seed, image)."""
    codec_path: FilePath | None = None
    """Folder of the autoencoder, if it is not where training found it."""
    out: FilePath | None = None
    """JSON to write; None: likelihood_STEP.json in the run's samples."""

    def __post_init__(self) -> None:
        check_likelihood(self)


@dataclass(frozen=True)
class AttentionConfig:
    """Draw where cls and the registers look, and how many channels the gates suppress."""

    checkpoint: FilePath | None = None
    """Denoiser: checkpoint folder, a run folder, or its file `latest`."""
    weights: str = "ema"
    """The checkpoint's weights: raw, ema (the slowest average), ema_DECAY or
    ema_width_WIDTH."""
    classifier: FilePath | None = None
    """Instead of a checkpoint: folder by `convert`, or file of a released classifier."""
    image: FilePath | None = None
    """File, digits:3 (held-out) or digits:train:3; None: digits:0 for a model of digits."""
    t: Annotated[float, Ge(0), Le(1)] = 0.5
    """Time to which a denoiser's image is noised; 0 is noise, 1 the image."""
    label: str | None = None
    """Denoiser's class by name or number; None: the digit's own, else no class."""
    blocks: tuple[Annotated[int, Ge(0), Lt(MOST_BLOCKS)], ...] = ()
    """Numbers of the blocks to draw, from 0; none given: four spread evenly."""
    head: Annotated[int, Ge(0), Lt(2**16)] | None = None
    """Number of one head, from 0; None: the mean over heads."""
    interpolation: Literal["nearest", "bilinear"] = "nearest"
    """How a map is enlarged."""
    suppressed: Fraction = 0.1
    """A channel is suppressed where |scale| is at most this part of its branch's mean |scale|."""
    seed: Seed = 0
    """Seed of the noise in a denoiser's image."""
    codec_path: FilePath | None = None
    """Folder of the denoiser's autoencoder, if it is not where training found it."""
    heads: Annotated[int, Ge(1), Le(2**16)] | None = None
    """Classifier's heads, where neither QK-norm nor a known size tells them."""
    image_size: ImageSize | None = None
    """Side of the classifier's images in pixels; None: the trained one."""
    out: FilePath | None = None
    """Folder to write to; None: attention_STEP in the run's samples, or beside the classifier."""

    def __post_init__(self) -> None:
        check_attention(self)


def check_metrics(config: MetricsConfig) -> None:
    """Refuses two files of weights, a page that is not written, and a single resample."""
    check_values(config)
    check_weights(config)
    if config.report.out and not config.report.write:
        raise UserError(f"report.out {config.report.out} has no use with report.write False")
    if config.bootstrap == 1:
        raise UserError("bootstrap 1 must be 0, or 2 resamples or more, such as 20")


def check_sweep(config: SweepConfig) -> None:
    """Refuses a sweep without cells, and options that its axes replace."""
    check_sampler(config)
    for name, value, axis in (
        ("guidance.scale", config.guidance.scale, "scales"),
        ("guidance.interval", config.guidance.interval, "intervals"),
    ):
        if value != getattr(GuidanceConfig, name.removeprefix("guidance.")):
            raise UserError(f"{name} has no effect on a sweep; use {axis}")
    if config.indices:
        raise UserError("indices have no effect on a sweep; drop them")
    if not (config.scales and config.intervals):
        raise UserError("scales and intervals need a value each")
    for low, high in map(interval_of, config.intervals):
        check_interval(replace(config.guidance, interval=(low, high)), "intervals")


def interval_of(text: str) -> tuple[float, float]:
    """(low, high) of LOW,HIGH."""
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise UserError(f"intervals {text} must be LOW,HIGH such as 0.3,1") from None
    return low, high


def likelihood_sampler(config: LikelihoodConfig) -> SamplerConfig:
    """The sampler's options with the choices of a likelihood."""
    return SamplerConfig(
        config.checkpoint,
        weights=config.weights,
        method=config.method,
        steps=config.steps,
        atol=config.atol,
        rtol=config.rtol,
        eps=config.eps,
        batch_size=config.batch_size,
        precision=config.precision,
        attention=config.attention,
        seed=config.seed,
        codec_path=config.codec_path,
    )


def check_likelihood(config: LikelihoodConfig) -> None:
    """Refuses what the sampler would refuse, and another file than JSON."""
    check_values(config)
    likelihood_sampler(config)
    if config.out is not None and not config.out.endswith(".json"):
        raise UserError(f"out {config.out} must end in .json")


def check_attention(config: AttentionConfig) -> None:
    """Refuses options that do not fit together, before anything is loaded."""
    check_values(config)
    if (config.checkpoint is None) == (config.classifier is None):
        raise UserError("give either a denoiser by --checkpoint RUN or --classifier PATH")
    if config.checkpoint is None:
        kind, foreign = "a classifier", ("label", "codec_path")
    else:
        kind, foreign = "a denoiser", ("heads", "image_size")
    for name in foreign:
        if getattr(config, name) is not None:
            raise UserError(f"{name} has no use for {kind}; drop it")
