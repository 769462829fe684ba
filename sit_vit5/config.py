"""Every option of training, sampling and evaluation. Imports no torch, so that --help is quick.

A docstring below a field is its text in `--help`. `None` means absent; 0 switches an interval off.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Literal, get_args, get_origin, get_type_hints

from tyro.conf import Positional

from sit_vit5 import presets
from sit_vit5.errors import UserError, choose


@dataclass(frozen=True)
class DataConfig:
    """What is learned from."""

    source: str | None = None
    """Built-in data set (digits), or folder; a path alone means folder."""
    path: str | None = None
    """Folder of images, one sub-folder per class."""
    image_size: int = 256
    """Side of the training images in pixels (ADM centre crop)."""
    unconditional: bool = False
    """Ignore the classes: num_classes 0, and a folder needs no sub-folders."""
    horizontal_flip: bool = True
    """Mirror each visit of an image with probability 1/2."""
    on_bad_image: Literal["error", "skip"] = "error"
    """A file that cannot be decoded stops the run, or is replaced by the next one and counted."""
    workers: int = 4
    """Loader processes per training process; 0 loads in the training process."""


@dataclass(frozen=True)
class CodecConfig:
    """How images become the latents that the model sees."""

    name: str = "sd-vae-ema"
    """identity (pixels), sd-vae-ema or sd-vae-mse (Stable Diffusion's AutoencoderKL)."""
    path: str | None = None
    """Local folder or hub id of the autoencoder, instead of the name's own hub id."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """What the network learns; part of every checkpoint and read by every sampler."""

    interpolant: Literal["linear", "gvp", "vp"] = "linear"
    """Path from noise (t = 0) to data (t = 1)."""
    prediction: Literal["velocity", "score", "noise", "data"] = "velocity"
    """What the network predicts."""
    weights: Literal["none", "velocity", "likelihood"] = "none"
    """Weight of the squared error over t, for score, noise and data: none, that of the velocity
    loss, or a bound of the likelihood."""
    times: Literal["uniform", "logit_normal"] = "uniform"
    """Distribution of t in training."""
    times_mean: float = 0.0
    """Mean of logit t for logit_normal."""
    times_std: float = 1.0
    """Standard deviation of logit t for logit_normal."""
    shift: float = 1.0
    """Shifts t towards noise in training and in the samplers' grids (SD3); 1: not."""
    class_dropout: float = 0.1
    """Probability that a sample's label is replaced by the null label."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up to a constant rate."""

    lr: float = 1e-4
    """Learning rate after warm-up, per optimizer step."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment per step."""
    eps: float = 1e-8
    """Term added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay per step, times lr."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly."""
    clip_norm: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""


@dataclass(frozen=True)
class EmaConfig:
    """Moving averages of the weights; all decays are kept at once."""

    decays: tuple[float, ...] = (0.9999,)
    """Decay per optimizer step of each average."""
    warmup: bool = True
    """Lower the decay to (1 + step) / (10 + step) while that is smaller."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is written."""

    every: int = 10000
    """Optimizer steps between checkpoints; 0: only the first, the last, and on interruption."""
    keep: int = 3
    """Newest checkpoints kept; older ones are removed after a new one is complete; 0 keeps all."""


@dataclass(frozen=True)
class PreviewConfig:
    """Sample grids drawn during training, of raw and averaged weights."""

    every: int = 10000
    """Optimizer steps between grids; 0: none."""
    columns: int = 4
    """Images per class."""
    classes: int = 10
    """Number of classes shown, from the first."""
    method: Literal["euler", "midpoint", "heun", "heun3", "rk4", "ab2"] = "heun"
    """Sampler of the grids."""
    steps: int = 25
    """Sampler steps."""
    guidance_scale: float | None = None
    """Classifier-free guidance of the grids; 1 is off; None: 2, or 1 without a null label."""


@dataclass(frozen=True)
class TrainConfig:
    """Train a flow-matching model. An example without any data: --config configs/digits.yaml"""

    model: str = "ViT5-XL/2"
    """Recipe, size and patch; sets all of backbone. Without a patch: 2."""
    name: str | None = None
    """Name of the run; None: made from the model and the data."""
    output_dir: str = "runs"
    """Folder that holds the run folder."""
    init_from: str | None = None
    """Checkpoint (its averaged weights) or converted classifier that starts a new run; what is
    taken, resized and left is listed."""
    steps: int = 400000
    """Optimizer steps in total."""
    batch_size: int = 256
    """Images per optimizer step over all processes and accumulation steps together."""
    accumulation: int = 1
    """Forward passes per optimizer step and process."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Precision of matrix products; weights, norms, loss, averages and sampler state are fp32."""
    attention: Literal["fused", "fp32_math"] = "fused"
    """Fused kernels, or softmax(q k) v written out in fp32, to compare with."""
    recompute: bool = False
    """Keep only the input of each block for the backward pass, and run the block again there."""
    compile: bool = False
    """Compile the blocks one by one with torch.compile (needs a C++ compiler on CPU)."""
    seed: int = 0
    """Seed of everything random: weights, data order, noise, times, label dropout, previews."""
    log_every: int = 100
    """Optimizer steps between log lines."""
    max_skipped: int = 10
    """Steps in a row with a non-finite gradient before the run stops."""
    data: DataConfig = DataConfig()
    codec: CodecConfig = CodecConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig = EmaConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    preview: PreviewConfig = PreviewConfig()
    backbone: presets.Backbone = presets.backbone("ViT5-XL/2")

    def __post_init__(self) -> None:
        check_train(self)


# Methods that choose their steps, and methods that draw noise; all others have a fixed grid.
ADAPTIVE_METHODS = ("dopri5", "dopri8", "bosh3", "adaptive_heun", "fehlberg2")
SDE_METHODS = ("euler_maruyama", "stochastic_heun")


@dataclass(frozen=True)
class GuidanceConfig:
    """Classifier-free guidance, or autoguidance by a worse network."""

    scale: float | None = None
    """1 is off and costs half; None: 1 for sample sets, 2 for grids of models with a null label."""
    channels: int | None = None
    """Number of channels guided, from the first; None: all. SiT's and DiT's code guide 3 of 4."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest t at which guidance acts; elsewhere it costs nothing."""
    interval_unit: Literal["t", "sigma", "step"] = "t"
    """Unit of the interval: our t, noise levels sigma / alpha, or numbers of solver steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the scale rises over the interval; its mean is the scale."""
    reference: str | None = None
    """Checkpoint of a worse network to push away from (autoguidance); None: the null label."""
    reference_weights: str = "ema"
    """That checkpoint's weights: raw, ema or ema_DECAY."""


@dataclass(frozen=True)
class SdeConfig:
    """The choices of euler_maruyama and stochastic_heun."""

    diffusion: Literal[
        "constant", "sbdm", "sigma", "linear", "decreasing", "increasing-decreasing"
    ] = "sigma"
    """Diffusion coefficient w_t; the noise is sqrt(2 w_t) dW."""
    norm: float = 1.0
    """Factor of the coefficient."""
    last_step: Literal["none", "mean", "euler", "tweedie"] = "mean"
    """Last step to t = 1, without noise."""
    last_step_size: float = 0.04
    """Its size in t."""


@dataclass(frozen=True)
class SamplerConfig:
    """How noise becomes images."""

    checkpoint: str
    """Checkpoint folder, a run folder, or its file `latest`."""
    weights: str = "ema"
    """raw, ema (the slowest average), or ema_DECAY such as ema_0.9999."""
    method: Literal[
        "euler", "midpoint", "heun", "heun3", "rk4", "ab2",
        "dopri5", "dopri8", "bosh3", "adaptive_heun", "fehlberg2",
        "euler_maruyama", "stochastic_heun",
    ] = "heun"  # fmt: skip
    """ODE on a fixed grid, ODE with steps of its own choice (from dopri5 on), or SDE (last two)."""
    steps: int | None = None
    """Integration intervals, an SDE's last step included; fixed grids only. None: 50, SDE 250."""
    atol: float | None = None
    """Absolute tolerance of an adaptive method; None: 1e-6."""
    rtol: float | None = None
    """Relative tolerance of an adaptive method; None: 1e-3."""
    shift: float | None = None
    """Shift of the grid towards noise; None: the checkpoint's own, as in training."""
    eps: float | None = None
    """Distance in t from an end where the prediction is singular; None: SiT's, 1e-3."""
    batch_size: int = 64
    """Images per network call and process."""
    precision: Literal["bf16", "fp32"] = "fp32"
    """Precision of matrix products; the sampler's state is fp32."""
    attention: Literal["fused", "fp32_math"] = "fused"
    """Fused kernels, or softmax(q k) v written out in fp32, to compare with."""
    seed: int = 0
    """Image i starts from the noise of (seed, i), whatever the batch or process."""
    codec_path: str | None = None
    """Folder of the autoencoder, if it is not where training found it."""
    guidance: GuidanceConfig = GuidanceConfig()
    sde: SdeConfig = SdeConfig()

    def __post_init__(self) -> None:
        check_sampler(self)


@dataclass(frozen=True)
class GridConfig(SamplerConfig):
    """Draw a labelled grid of samples, one row per class."""

    columns: int = 8
    """Images per class."""
    classes: tuple[str, ...] = ()
    """Class names or numbers to draw; none given: the first ten."""
    out: str | None = None
    """PNG to write; None: samples/grid_STEP.png in the run folder."""


# Kinds of pictures that a path or an interpolation is written as; all but the first move.
PICTURES = (".png", ".gif", ".webp")


@dataclass(frozen=True)
class PathConfig(SamplerConfig):
    """Draw how noise becomes images: x_t and the data expected from it, at times from 0 to 1."""

    classes: tuple[str, ...] = ()
    """Class names or numbers to draw; none given: the first four."""
    images: int = 1
    """Images per class."""
    frames: int = 10
    """Times shown, both ends included: columns of a PNG, frames of an animation."""
    out: str | None = None
    """PNG, or animated .gif or .webp to write; None: samples/path_STEP.png in the run folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_picture(self.out)


@dataclass(frozen=True)
class InterpolateConfig(SamplerConfig):
    """Draw the images between the noises of two seeds, or on the way through several."""

    seeds: tuple[int, ...] = (0, 1)
    """Seeds from one to the next, instead of seed; each gives its image 0."""
    classes: tuple[str, ...] = ()
    """Class names or numbers to draw, a row each; none given: the first four."""
    to_class: str | None = None
    """Class at the last seed: the class embedding goes there in a straight line."""
    frames: int = 9
    """Pictures from one seed to the next, both included."""
    out: str | None = None
    """PNG, or animated .gif or .webp; None: samples/interpolation_STEP.png in the run folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_picture(self.out)
        if len(self.seeds) < 2:
            raise UserError(
                f"seeds {' '.join(map(str, self.seeds))} must be two or more, such as 0 1"
            )
        if self.seed:
            raise UserError(f"seed {self.seed} has no effect; use seeds")


@dataclass(frozen=True)
class GenerateConfig(SamplerConfig):
    """Write N samples to samples.npz with a manifest; run again, it makes only what is missing."""

    num_samples: int = 50000
    """Number of images."""
    labels: Literal["random", "balanced"] = "random"
    """Uniformly drawn labels (the ADM protocol), or label i modulo the number of classes."""
    classes: tuple[str, ...] = ()
    """Class names or numbers to draw from; none given: all."""
    out: str | None = None
    """Folder to write to; None: samples/STEP_N beside the checkpoints."""


@dataclass(frozen=True)
class MetricsConfig:
    """Compare a set of samples with a reference."""

    samples: Positional[str]
    """samples.npz (arr_0, uint8, N H W C) or a folder of images."""
    reference: str
    """npz (arr_0, or mu and sigma), a folder of images, or a built-in set: digits:held-out."""
    features: str = "inception"
    """pixels, or inception (torch-fidelity's InceptionV3, 2048 features)."""
    floor: str | None = None
    """A second real set compared with the reference: what a perfect model would score."""
    agreement: str | None = None
    """Labelled built-in set; reports how many samples its classifier assigns to the asked class."""
    inception_weights: str | None = None
    """File of torch-fidelity's Inception weights, instead of its cache."""
    batch_size: int = 64
    """Images per feature batch; the result does not depend on it."""
    out: str | None = None
    """JSON to write; None: metrics.json beside the samples."""

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True, kw_only=True)
class SweepConfig(GenerateConfig):
    """Rank guidance scales, guidance intervals and averages on a few samples of each."""

    reference: str
    """npz (arr_0, or mu and sigma), a folder of images, or a built-in set: digits:held-out."""
    scales: tuple[float, ...] = (1.0, 1.5, 2.0, 3.0)
    """Guidance scales; 1 is off and runs once, whatever the intervals."""
    intervals: tuple[str, ...] = ("0,1",)
    """Guidance intervals LOW,HIGH such as 0,1 0.3,1, in guidance.interval_unit."""
    weights: tuple[str, ...] = ()
    """raw, ema (the slowest average), or ema_DECAY; none given: every average."""
    num_samples: int = 500
    """Images per cell; all cells share noise and labels."""
    features: str = "inception"
    """pixels, or inception (torch-fidelity's InceptionV3, 2048 features)."""
    agreement: str | None = None
    """Labelled built-in set (digits): also the share of samples classified as asked."""
    inception_weights: str | None = None
    """File of torch-fidelity's Inception weights, instead of its cache."""
    out: str | None = None
    """Folder to write to; None: samples/sweep_STEP_N in the run folder."""

    def __post_init__(self) -> None:
        check_sweep(self)


@dataclass(frozen=True)
class LikelihoodConfig:
    """Log-likelihood of images under the model's ODE."""

    checkpoint: str
    """Checkpoint folder, a run folder, or its file `latest`."""
    data: str
    """Built-in set (digits:held-out, digits:train), or a folder with a sub-folder per class."""
    weights: str = "ema"
    """raw, ema (the slowest average), or ema_DECAY such as ema_0.9999."""
    num_images: int = 64
    """Images, drawn from the data by the seed; 0: all."""
    method: Literal[
        "dopri5", "dopri8", "bosh3", "adaptive_heun", "fehlberg2",
        "euler", "midpoint", "heun", "heun3", "rk4",
    ] = "dopri5"  # fmt: skip
    """ODE solver: with steps of its own choice, or on a fixed grid (from euler on)."""
    steps: int | None = None
    """Integration intervals of a fixed grid; None: 50."""
    atol: float | None = None
    """Absolute tolerance of an adaptive method; None: 1e-6."""
    rtol: float | None = None
    """Relative tolerance of an adaptive method; None: 1e-3."""
    eps: float | None = None
    """Distance in t from an end where the prediction is singular; None: SiT's, 1e-3."""
    probes: int = 1
    """Random sign vectors per image that estimate the divergence; the cost is in proportion."""
    dequantize: Literal["uniform", "none"] | None = None
    """Uniform noise of one grey level on the pixels, or none; None: uniform for models of pixels,
    none for models of latents."""
    null_label: bool = False
    """Likelihood without the class, by the null label, instead of given each image's class."""
    batch_size: int = 64
    """Images per network call and process."""
    precision: Literal["bf16", "fp32"] = "fp32"
    """Precision of matrix products; the solver's state is fp32."""
    attention: Literal["fused", "fp32_math"] = "fused"
    """Fused kernels, or softmax(q k) v written out in fp32, to compare with."""
    seed: int = 0
    """Of the choice of images; probes and dequantisation are those of (seed, image)."""
    codec_path: str | None = None
    """Folder of the autoencoder, if it is not where training found it."""
    out: str | None = None
    """JSON to write; None: likelihood_STEP.json in the run's samples."""

    def __post_init__(self) -> None:
        check_likelihood(self)


@dataclass(frozen=True)
class ConvertConfig:
    """Turn official weights into a folder that the other commands read."""

    source: Positional[str]
    """File of a released ViT-5 or DeiT-III classifier, or of SiT (.pt, .pth or .safetensors)."""
    to: str
    """Folder to write; it must not exist."""
    kind: Literal["sit", "dit"] | None = None
    """SiT or DiT, whose files have the same keys; None: as the file's name says."""
    step: int = 0
    """Optimizer steps behind the weights, for the record; 0: unknown."""
    heads: int | None = None
    """Attention heads; None: those of the published size with this width and depth."""
    class_names: str | None = None
    """File with one class name per line; None: ImageNet's WordNet ids where classes are 1,000."""
    codec: CodecConfig = CodecConfig()

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class ExportConfig:
    """Write a checkpoint as a folder for diffusers, ready for the Hub."""

    checkpoint: str
    """Checkpoint folder, a run folder, or its file `latest`."""
    to: str
    """Folder to write; it must not exist."""
    weights: str = "ema"
    """raw, ema (the slowest average), or ema_DECAY such as ema_0.9999."""
    license: str = "unknown"
    """Licence of the weights, for the model card: the Hub's name of it, such as mit."""
    codec_path: str | None = None
    """Folder of the autoencoder, if it is not where training found it."""

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class AttentionConfig:
    """Draw where cls and the registers look, and how many channels the gates suppress."""

    checkpoint: str | None = None
    """Denoiser: checkpoint folder, a run folder, or its file `latest`."""
    weights: str = "ema"
    """The checkpoint's weights: raw, ema (the slowest average), or ema_DECAY."""
    classifier: str | None = None
    """Instead of a checkpoint: folder by sit_vit5.convert, or file of a released classifier."""
    image: str | None = None
    """File, digits:3 (held-out) or digits:train:3; None: digits:0 for a model of digits."""
    t: float = 0.5
    """Time to which a denoiser's image is noised; 0 is noise, 1 the image."""
    label: str | None = None
    """Denoiser's class by name or number; None: the digit's own, else no class."""
    blocks: tuple[int, ...] = ()
    """Numbers of the blocks to draw, from 0; none given: four spread evenly."""
    head: int | None = None
    """Number of one head, from 0; None: the mean over heads."""
    interpolation: Literal["nearest", "bilinear"] = "nearest"
    """How a map is enlarged."""
    suppressed: float = 0.1
    """A channel is suppressed where |scale| is at most this part of its branch's mean |scale|."""
    seed: int = 0
    """Seed of the noise in a denoiser's image."""
    codec_path: str | None = None
    """Folder of the denoiser's autoencoder, if it is not where training found it."""
    heads: int | None = None
    """Classifier's heads, where neither QK-norm nor a known size tells them."""
    image_size: int | None = None
    """Side of the classifier's images in pixels; None: the trained one."""
    out: str | None = None
    """Folder to write to; None: attention_STEP in the run's samples, or beside the classifier."""

    def __post_init__(self) -> None:
        check_attention(self)


# Smallest legal values; nothing here has a largest.
_AT_LEAST = {
    "step": 0,
    "heads": 1,
    "steps": 1,
    "batch_size": 1,
    "accumulation": 1,
    "log_every": 1,
    "max_skipped": 1,
    "seed": 0,
    "data.image_size": 1,
    "data.workers": 0,
    "optimizer.lr": 0,
    "optimizer.eps": 0,
    "optimizer.weight_decay": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.clip_norm": 0,
    "objective.class_dropout": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 0,
    "preview.every": 0,
    "preview.columns": 1,
    "preview.classes": 1,
    "preview.steps": 1,
    "preview.guidance_scale": 0,
    "columns": 1,
    "images": 1,
    "frames": 2,
    "seeds": 0,
    "head": 0,
    "image_size": 1,
    "num_samples": 1,
    "num_images": 0,
    "probes": 1,
    "scales": 0,
    "guidance.scale": 0,
    "guidance.channels": 1,
    "objective.shift": 1e-6,
    "objective.times_std": 0,
    "atol": 0,
    "rtol": 0,
    "shift": 1e-6,
    "eps": 0,
    "sde.norm": 0,
    "sde.last_step_size": 0,
}


def check_train(config: TrainConfig) -> None:
    """Refuses values that no run can have. What needs files or processes is checked later."""
    check_values(config)
    if config.seed >= 2**63:
        raise UserError(f"seed {config.seed} must be below 2**63")
    if config.objective.class_dropout >= 1:
        raise UserError(f"objective.class_dropout {config.objective.class_dropout} must be below 1")
    objective = config.objective
    if objective.weights != "none" and objective.prediction == "velocity":
        raise UserError(
            f"objective.weights {objective.weights} has no effect on the prediction velocity; use "
            "none, or predict score, noise or data"
        )
    if objective.times == "uniform" and (objective.times_mean, objective.times_std) != (0, 1):
        raise UserError("objective.times_mean and times_std need objective.times logit_normal")
    if config.optimizer.eps == 0:
        raise UserError("optimizer.eps 0 must be above 0: a still weight would divide by zero")
    if not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise UserError(f"optimizer.betas {list(config.optimizer.betas)} must lie in [0, 1)")
    bad_decays = [decay for decay in config.ema.decays if not 0 < decay < 1]
    if bad_decays or not config.ema.decays:
        raise UserError(f"ema.decays {list(config.ema.decays)} must hold numbers between 0 and 1")
    if config.name is not None and not re.fullmatch(r"\w[\w.+=@ -]{0,199}", config.name):
        raise UserError(
            f"name {config.name!r} must be a plain folder name; use output_dir for paths"
        )


def check_sampler(config: SamplerConfig) -> None:
    """Refuses options of another method than the chosen one, and intervals upside down."""
    check_values(config)
    method = config.method
    if method in ADAPTIVE_METHODS:
        foreign = {"steps": config.steps, "shift": config.shift}
        reason = f"{method} chooses its steps; use atol and rtol, or a fixed-step method"
    else:
        foreign = {"atol": config.atol, "rtol": config.rtol}
        reason = f"{method} has a fixed grid; use steps, or an adaptive method such as dopri5"
    for name, value in foreign.items():
        if value is not None:
            raise UserError(f"{name} {value:g} has no effect: {reason}")
    if method not in SDE_METHODS and config.sde != SdeConfig():
        raise UserError(f"sde options have no effect on {method}; use {' or '.join(SDE_METHODS)}")
    for name in ("atol", "rtol"):
        if getattr(config, name) == 0:
            raise UserError(f"{name} 0 must be above 0")
    if config.eps is not None and not 0 < config.eps < 0.5:
        raise UserError(f"eps {config.eps} must lie between 0 and 0.5")
    if config.sde.last_step == "none":
        if config.sde.last_step_size not in (0, SdeConfig.last_step_size):
            raise UserError("sde.last_step_size has no effect with sde.last_step none")
    elif not 0 < config.sde.last_step_size < 1:
        raise UserError(f"sde.last_step_size {config.sde.last_step_size} must lie between 0 and 1")
    check_interval(config.guidance, "guidance.interval")


def check_sweep(config: SweepConfig) -> None:
    """Refuses a sweep without cells, and options that its axes replace."""
    check_sampler(config)
    for name, value, axis in (
        ("guidance.scale", config.guidance.scale, "scales"),
        ("guidance.interval", config.guidance.interval, "intervals"),
    ):
        if value != getattr(GuidanceConfig, name.removeprefix("guidance.")):
            raise UserError(f"{name} has no effect on a sweep; use {axis}")
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


def check_interval(guidance: GuidanceConfig, option: str) -> None:
    """Refuses an interval upside down or, in t, outside of 0 and 1."""
    low, high = guidance.interval
    if not low <= high:  # also where one is no number
        raise UserError(f"{option} {low:g} {high:g} is upside down; give low, then high")
    if guidance.interval_unit == "t" and not 0 <= low <= high <= 1:
        raise UserError(f"{option} {low:g} {high:g} must lie within 0 and 1")


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


def check_picture(out: str | None) -> None:
    """Refuses a file name of no kind in `PICTURES`."""
    if out and not out.lower().endswith(PICTURES):
        raise UserError(f"out {out} must end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")


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
    if not 0 <= config.t <= 1:
        raise UserError(f"t {config.t} must lie in [0, 1]; 0 is noise, 1 the image")
    if not 0 < config.suppressed < 1:
        raise UserError(f"suppressed {config.suppressed} must lie between 0 and 1, such as 0.1")


def check_values(config: object, prefix: str = "") -> None:
    """Refuses empty texts, numbers not finite or below their smallest legal value, and, in what was
    not read by the command line's parser, words outside a choice."""
    hints = get_type_hints(type(config))
    for field in fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if get_origin(hints[field.name]) is Literal:
            choose(name, value, dict.fromkeys(get_args(hints[field.name])))
        if is_dataclass(value):
            check_values(value, f"{name}.")
        if value == "":  # an unset variable of the shell
            raise UserError(f"{name} needs a value")
        for number in value if isinstance(value, tuple) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"{name} {number} must be finite")
            if isinstance(number, (int, float)) and number < _AT_LEAST.get(name, -math.inf):
                raise UserError(f"{name} {number} must be at least {_AT_LEAST[name]}")
