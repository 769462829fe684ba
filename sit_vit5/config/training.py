"""Options of train_sit.py, which are those of a checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from sit_vit5.config import presets
from sit_vit5.config.fields import (
    BatchSize,
    FilePath,
    Fraction,
    GuidanceScale,
    ImageSize,
    Interval,
    Seed,
    Shift,
    Steps,
    Workers,
    check_values,
)
from sit_vit5.utils.errors import UserError


@dataclass(frozen=True)
class PreviewConfig:
    """Sample grids drawn during training, of raw and averaged weights."""

    every: Interval = 10000
    """Optimizer steps between grids; 0: none."""
    columns: Annotated[int, Ge(1), Le(1000)] = 4
    """Images per class."""
    classes: Annotated[int, Ge(1), Le(1000)] = 10
    """Number of classes shown, from the first."""
    method: Literal["euler", "midpoint", "heun", "heun3", "rk4", "ab2"] = "heun"
    """Sampler of the grids."""
    steps: Annotated[int, Ge(1), Le(10_000)] = 25
    """Sampler steps."""
    guidance_scale: GuidanceScale | None = None
    """Classifier-free guidance of the grids; 1 is off; None: 2, or 1 without a null label."""
    decoder: FilePath | None = None
    """Local folder or hub id of an AutoencoderTiny that decodes the grids of cached latents; None:
    the codec, or taesd, if it is on this machine, else no grids."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Metrics of samples during training, on all processes; into log, trackers and run.html."""

    every: Interval = 0
    """Optimizer steps between evaluations; 0: none."""
    reference: FilePath | None = None
    """What the samples are compared with, as of evaluate/metrics.py."""
    metrics: tuple[str, ...] = ("fid",)
    """Metrics, as of evaluate/metrics.py."""
    features: str = "inception"
    """Features, as of evaluate/metrics.py."""
    feature_weights: FilePath | None = None
    """File of the features' network, instead of its library's cache."""
    num_samples: Annotated[int, Ge(2), Le(10**8)] = 5000
    """Samples, with the same noise and labels at each evaluation."""
    weights: str = "ema"
    """raw, ema (the slowest average), ema_DECAY or ema_width_WIDTH."""
    method: Literal["euler", "midpoint", "heun", "heun3", "rk4", "ab2"] = "heun"
    """Sampler."""
    steps: Annotated[int, Ge(1), Le(10_000)] = 25
    """Sampler steps."""
    guidance_scale: GuidanceScale = 1.0
    """Classifier-free guidance; 1 is off."""
    batch_size: BatchSize = 64
    """Samples drawn at once by a process."""


@dataclass(frozen=True)
class WatchdogConfig:
    """What is watched while a run trains, and what is done about it."""

    on_nonfinite: Literal["skip", "rewind", "stop"] = "skip"
    """A gradient that is not finite never reaches the weights; then the step is skipped, or the run
    goes back to its last checkpoint and past the data since, or it stops."""
    spike: Annotated[float, Ge(0), Le(1e9)] = 10.0
    """Multiple of the median gradient norm of the last 128 good steps that is a spike; 0: none."""
    on_spike: Literal["log", "skip", "rewind", "stop"] = "log"
    """A spike is only said, or its step is skipped, and then as for on_nonfinite."""
    max_rewinds: Interval = 3
    """Rewinds in a run before it stops."""
    data_wait: Annotated[float, Ge(0), Le(1e9)] = 0.2
    """Share of the time spent waiting for data above which it is said."""
    patience: Annotated[float, Ge(0.01), Le(525_600)] = 60.0
    """Minutes that processes wait for one another before the run stops and names the stuck one."""


@dataclass(frozen=True)
class DataConfig:
    """What is learned from."""

    source: str | None = None
    """digits (built in), fashion-mnist, folder (of images), huggingface (data set), idx, latents (a
    cache), npz or webdataset; None: what lies at the path."""
    path: FilePath | None = None
    """Folder of images, one sub-folder per class; or a file, folder or hub id of another source."""
    split: str = "train"
    """Part of the data set: train or test of idx and fashion-mnist; train or held-out of digits;
    what a Hugging Face data set has."""
    image_column: str | None = None
    """Column of the images in a Hugging Face data set; None: the one with the feature Image."""
    label_column: str | None = None
    """Column of the labels; None: the one with the feature ClassLabel."""
    image_size: ImageSize = 256
    """Side of the training images in pixels (ADM centre crop)."""
    unconditional: bool = False
    """Ignore the classes: num_classes 0, and a folder needs no sub-folders."""
    horizontal_flip: bool = True
    """Mirror each visit of an image with probability 1/2."""
    on_bad_image: Literal["error", "skip"] = "error"
    """A file that cannot be decoded stops the run, or is replaced by the next one and counted."""
    workers: Workers = 4
    """Loader processes per training process; 0 loads in the training process."""


@dataclass(frozen=True)
class CodecConfig:
    """How images become the latents that the model sees."""

    name: str = "sd-vae-ema"
    """identity (pixels), sd-vae-ema or sd-vae-mse (Stable Diffusion's AutoencoderKL), taesd (its
    tiny AutoencoderTiny), or diffusers (the AutoencoderKL, -Tiny or -DC at path)."""
    path: FilePath | None = None
    """Local folder or hub id (ORG/NAME, ORG/NAME/vae) of the autoencoder, instead of the name's
    own; diffusers has none of its own."""
    scale: Annotated[float, Ge(1e-6), Le(1e6)] | None = None
    """Latents are scale * (raw - shift). None: scaling_factor in the autoencoder's config.json."""
    shift: Annotated[float, Ge(-1e6), Le(1e6)] | None = None
    """None: shift_factor in the autoencoder's config.json, or 0."""


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
    weights_bound: Annotated[float, Gt(0), Le(1e6)] | None = 20.0
    """Largest factor of the error in weights velocity and likelihood, which are infinite at an end
    of the path: 20 as 1 - t >= 0.05 in JiT; None: as in SiT."""
    times: Literal["uniform", "logit_normal"] = "uniform"
    """Distribution of t in training."""
    times_mean: Annotated[float, Ge(-100), Le(100)] = 0.0
    """Mean of logit t for logit_normal."""
    times_std: Annotated[float, Ge(0), Le(100)] = 1.0
    """Standard deviation of logit t for logit_normal."""
    shift: Shift = 1.0
    """Shifts t towards noise in training and in the samplers' grids (SD3); 1: not."""
    class_dropout: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Probability that a sample's label is replaced by the null label."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer with linear warm-up to a constant rate."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the matrices of the blocks and AdamW for everything else."""
    lr: Annotated[float, Ge(0), Le(1000)] = 1e-4
    """Learning rate after warm-up, per optimizer step."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.999)
    """Decay of the first and second moment per step."""
    eps: Annotated[float, Gt(0), Le(1)] = 1e-8
    """Term added to the denominator."""
    weight_decay: Annotated[float, Ge(0), Le(1000)] = 0.0
    """Decoupled weight decay per step, times lr."""
    warmup_steps: Interval = 0
    """Optimizer steps over which the rate rises linearly."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Nesterov momentum of Muon."""
    matrix_lr: Annotated[float, Ge(0), Le(1000)] | None = None
    """Learning rate of Muon's matrices, whose updates have AdamW's root mean square; None: lr."""
    clip_norm: Annotated[float, Ge(0), Le(1e9)] = 1.0
    """Largest gradient norm; 0 switches clipping off."""


# Of a grid, which is one image file.
MOST_PREVIEW_IMAGES = 10_000

# Relative width of the plain mean of all steps; a wider average would favour the first ones.
WIDEST = 12**-0.5
# 40 of 400,000 steps.
NARROWEST = 1e-4


def decay_name(decay: float) -> str:
    """Name of the weights averaged with a decay."""
    return f"ema_{decay}"


def width_name(width: float) -> str:
    """Name of the weights of a power-function average."""
    return f"ema_width_{width}"


@dataclass(frozen=True)
class EmaConfig:
    """Moving averages of the weights; all decays and widths are kept at once."""

    decays: tuple[Fraction, ...] = (0.9999,)
    """Decay per optimizer step of each average."""
    warmup: bool = True
    """Lower the decay to (1 + step) / (10 + step) while that is smaller."""
    widths: tuple[Fraction, ...] = ()
    """Relative widths, such as 0.05 0.1, of power-function averages, whose snapshots give any other
    width after training (EDM2, python -m sit_vit5 posthoc-ema)."""
    snapshot_every: Interval = 0
    """Optimizer steps between snapshots of the widths, which are all kept; 0: none."""
    device: Literal["model", "host"] = "model"
    """Where the averages are kept: beside the model, or in the host's memory, which costs a copy of
    the weights at every step."""

    @property
    def names(self) -> list[str]:
        """Names of the averages."""
        return [*map(decay_name, self.decays), *map(width_name, self.widths)]

    @property
    def slowest(self) -> str:
        """Name of the average of the largest decay; of widths alone, of the widest."""
        return decay_name(max(self.decays)) if self.decays else width_name(max(self.widths))

    def full_name(self, name: str) -> str:
        """Name of the weights: `ema` is the slowest average; raw and full names stay."""
        return self.slowest if name == "ema" else name


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is written."""

    every: Interval = 10000
    """Optimizer steps between checkpoints; 0: only the first, the last, and on interruption."""
    keep: Interval = 3
    """Newest checkpoints kept; older ones are removed after a new one is complete; 0 keeps all."""
    milestone_every: Interval = 0
    """Optimizer steps between checkpoints whose averages are never removed; 0: none."""
    background: bool = True
    """Copy the state and write it while training goes on, instead of waiting for the disk; takes
    host memory of a checkpoint's size."""


@dataclass(frozen=True)
class TrainConfig:
    """Train a flow-matching model. An example without any data: --config configs/digits.yaml"""

    model: str = "ViT5-XL/2"
    """Recipe, size and patch; sets all of backbone. Without a patch: 2."""
    name: str | None = None
    """Name of the run; None: made from the model and the data."""
    output_dir: FilePath = "runs"
    """Folder that holds the run folder."""
    init_from: FilePath | None = None
    """Checkpoint (its averaged weights) or converted classifier that starts a new run; what is
    taken, resized and left is listed."""
    steps: Steps = 400000
    """Optimizer steps in total."""
    batch_size: Annotated[int, Ge(1), Le(2**20)] = 256
    """Images per optimizer step over all processes and accumulation steps together."""
    accumulation: Annotated[int, Ge(1), Le(2**16)] = 1
    """Forward passes per optimizer step and process."""
    precision: Literal["bf16", "tf32", "fp32"] = "bf16"
    """Precision of matrix products; weights, norms, loss, averages and sampler state are fp32. tf32
    is fp32 whose products CUDA rounds to 10 bits, as SiT's code trains."""
    attention: Literal["fused", "fp32_math"] = "fused"
    """Fused kernels, or softmax(q k) v written out in fp32, to compare with."""
    parallel: Literal["ddp", "fsdp2"] | None = None
    """How processes share the work: each has the whole model (ddp), or keeps a part of every
    weight, moment and average (fsdp2, for models that do not fit); None: what the launcher says,
    else ddp. The checkpoints are the same."""
    activation_checkpointing: bool = False
    """Keep only the input of each block for the backward pass, and run the block again there."""
    compile: bool | None = None
    """Compile the blocks one by one with torch.compile (on CPU it needs a C++ compiler); None: on
    CUDA."""
    seed: Seed = 0
    """Seed of everything random: weights, data order, noise, times, label dropout, previews."""
    log_every: Steps = 100
    """Optimizer steps between log lines."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Also told what metrics.jsonl holds, by accelerate: tensorboard (into the run folder), wandb,
    trackio, mlflow and others; one that is missing or fails is left out."""
    max_skipped: Steps = 10
    """Steps in a row that are skipped, or whose gradient is zero, before the run stops."""
    data: DataConfig = DataConfig()
    codec: CodecConfig = CodecConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig = EmaConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    preview: PreviewConfig = PreviewConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    backbone: presets.Backbone = presets.backbone("ViT5-XL/2")

    def __post_init__(self) -> None:
        check_train(self)


def check_train(config: TrainConfig) -> None:
    """Refuses values that no run can have. What needs files or processes is checked later."""
    check_values(config)
    objective = config.objective
    if objective.weights != "none" and objective.prediction == "velocity":
        raise UserError(
            f"objective.weights {objective.weights} has no effect on the prediction velocity; use "
            "none, or predict score, noise or data"
        )
    if objective.times == "uniform" and (objective.times_mean, objective.times_std) != (0, 1):
        raise UserError("objective.times_mean and times_std need objective.times logit_normal")
    if config.optimizer.name != "muon" and config.optimizer.matrix_lr is not None:
        raise UserError("optimizer.matrix_lr needs optimizer.name muon")
    preview = config.preview
    if preview.columns * preview.classes > MOST_PREVIEW_IMAGES:
        raise UserError(
            f"preview.columns {preview.columns} x preview.classes {preview.classes} must be at "
            f"most {MOST_PREVIEW_IMAGES:,} images; lower one of them"
        )
    _check_ema(config.ema)
    _check_evaluation(config)
    if config.name is not None and not re.fullmatch(r"\w[\w.+=@ -]{0,199}", config.name):
        raise UserError(
            f"name {config.name!r} must be a plain folder name; use output_dir for paths"
        )


def check_width(name: str, width: float) -> None:
    """Refuses a relative width that no power-function average has."""
    if not NARROWEST <= width < WIDEST:
        raise UserError(
            f"{name} {width} must lie between {NARROWEST} and {WIDEST:.3f}, the width of the plain "
            "mean of all steps; try 0.1"
        )


def _check_ema(ema: EmaConfig) -> None:
    if not (ema.decays or ema.widths):
        raise UserError("ema.decays needs a value, such as 0.9999, where ema.widths has none")
    for width in ema.widths:
        check_width("ema.widths", width)
    if bool(ema.widths) != (ema.snapshot_every > 0):
        raise UserError(
            f"ema.widths {list(ema.widths)} and ema.snapshot_every {ema.snapshot_every} need each "
            "other; give both, such as --ema.widths 0.05 0.1 --ema.snapshot-every 5000, or neither"
        )


def _check_evaluation(config: TrainConfig) -> None:
    evaluation = config.evaluation
    if (evaluation.every > 0) != (evaluation.reference is not None):
        raise UserError(
            f"evaluation.every {evaluation.every} and evaluation.reference "
            f"{evaluation.reference} need each other; give both, or neither"
        )
    known = ["raw", "ema", *config.ema.names]
    if evaluation.weights not in known:
        raise UserError(
            f"evaluation.weights {evaluation.weights} is none of this run: {', '.join(known)}"
        )
    if evaluation.guidance_scale != 1 and config.objective.class_dropout == 0:
        raise UserError(
            f"evaluation.guidance_scale {evaluation.guidance_scale} needs a null label, which "
            "objective.class_dropout 0 does not train; use 1"
        )
