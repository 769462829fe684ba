"""The options of the sampling commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le, Lt

from sit_vit5.config.fields import (
    BatchSize,
    EndDistance,
    FilePath,
    GuidanceScale,
    NumImages,
    Seed,
    Shift,
    SolverSteps,
    Tolerance,
    check_values,
)
from sit_vit5.utils.errors import UserError

# Methods that choose their steps, and methods that draw noise; all others have a fixed grid.
ADAPTIVE_METHODS = ("dopri5", "dopri8", "bosh3", "adaptive_heun", "fehlberg2")
SDE_METHODS = ("euler_maruyama", "stochastic_heun")
# A smaller last step of an SDE ends where it starts, in fp32.
SMALLEST_LAST_STEP = 1e-6


@dataclass(frozen=True)
class GuidanceConfig:
    """Classifier-free guidance, or autoguidance by a worse network."""

    scale: GuidanceScale | None = None
    """1 is off and costs half; None: 1 for sample sets, 2 for grids of models with a null label."""
    channels: Annotated[int, Ge(1), Le(2**16)] | None = None
    """Number of channels guided, from the first; None: all. SiT's and DiT's code guide 3 of 4."""
    interval: tuple[Annotated[float, Ge(0), Le(1e9)], Annotated[float, Ge(0), Le(1e9)]] = (0.0, 1.0)
    """Lowest and highest t at which guidance acts; elsewhere it costs nothing."""
    interval_unit: Literal["t", "sigma", "step"] = "t"
    """Unit of the interval: our t, noise levels sigma / alpha, or numbers of solver steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the scale rises over the interval; its mean is the scale."""
    reference: FilePath | None = None
    """Checkpoint of a worse network to push away from (autoguidance); None: the null label."""
    reference_weights: str = "ema"
    """That checkpoint's weights: raw, ema, ema_DECAY or ema_width_WIDTH."""


@dataclass(frozen=True)
class SdeConfig:
    """The choices of euler_maruyama and stochastic_heun."""

    diffusion: Literal[
        "constant", "sbdm", "sigma", "linear", "decreasing", "increasing-decreasing"
    ] = "sigma"
    """Diffusion coefficient w_t; the noise is sqrt(2 w_t) dW."""
    norm: Annotated[float, Ge(0), Le(1000)] = 1.0
    """Factor of the coefficient."""
    last_step: Literal["none", "mean", "euler", "tweedie"] = "mean"
    """Last step to t = 1, without noise."""
    last_step_size: Annotated[float, Ge(0), Lt(1)] = 0.04
    """Its size in t."""


@dataclass(frozen=True)
class SamplerConfig:
    """How noise becomes images."""

    checkpoint: FilePath
    """Checkpoint folder, a run folder, or its file `latest`."""
    weights: str = "ema"
    """raw, ema (the slowest average), ema_DECAY such as ema_0.9999, or ema_width_WIDTH."""
    method: Literal[
        "euler", "midpoint", "heun", "heun3", "rk4", "ab2",
        "dopri5", "dopri8", "bosh3", "adaptive_heun", "fehlberg2",
        "euler_maruyama", "stochastic_heun",
    ] = "heun"  # fmt: skip
    """ODE on a fixed grid, ODE with steps of its own choice (from dopri5 on), or SDE (last two)."""
    steps: SolverSteps | None = None
    """Integration intervals, an SDE's last step included; fixed grids only. None: 50, SDE 250."""
    atol: Tolerance | None = None
    """Absolute tolerance of an adaptive method; None: 1e-6."""
    rtol: Tolerance | None = None
    """Relative tolerance of an adaptive method; None: 1e-3."""
    shift: Shift | None = None
    """Shift of the grid towards noise; None: the checkpoint's own, as in training."""
    eps: EndDistance | None = None
    """Distance in t from an end where the prediction is singular; None: SiT's, 1e-3."""
    batch_size: BatchSize = 64
    """Images per network call and process."""
    precision: Literal["bf16", "tf32", "fp32"] = "fp32"
    """Precision of matrix products; the sampler's state is fp32. tf32 is fp32 whose products CUDA
    rounds to 10 bits: the default of SiT's code, several times as fast on recent GPUs."""
    attention: Literal["fused", "fp32_math"] = "fused"
    """Fused kernels, or softmax(q k) v written out in fp32, to compare with."""
    seed: Seed = 0
    """Image i starts from the noise of (seed, i), whatever the batch or process."""
    codec_path: FilePath | None = None
    """Folder of the autoencoder, if it is not where training found it."""
    guidance: GuidanceConfig = GuidanceConfig()
    sde: SdeConfig = SdeConfig()

    def __post_init__(self) -> None:
        check_sampler(self)


@dataclass(frozen=True)
class GridConfig(SamplerConfig):
    """Draw a labelled grid of samples, one row per class."""

    columns: Annotated[int, Ge(1), Le(1000)] = 8
    """Images per class."""
    classes: tuple[str, ...] = ()
    """Class names or numbers to draw; none given: the first ten."""
    out: FilePath | None = None
    """PNG to write; None: samples/grid_STEP.png in the run folder."""


# Kinds of pictures that a path or an interpolation is written as; all but the first move.
PICTURES = (".png", ".gif", ".webp")


@dataclass(frozen=True)
class TrajectoryConfig(SamplerConfig):
    """Draw how noise becomes images: x_t and the data expected from it, at times from 0 to 1."""

    classes: tuple[str, ...] = ()
    """Class names or numbers to draw; none given: the first four."""
    images: Annotated[int, Ge(1), Le(1000)] = 1
    """Images per class."""
    frames: Annotated[int, Ge(2), Le(10_000)] | None = None
    """Times shown, both ends included: columns of a PNG, frames of an animation; None: 10, or as
    many as the solver has states."""
    out: FilePath | None = None
    """PNG, or animated .gif or .webp to write; None: samples/path_STEP.png in the run folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_picture(self.out)


@dataclass(frozen=True)
class InterpolateConfig(SamplerConfig):
    """Draw the images between the noises of two seeds, or on the way through several."""

    seeds: tuple[Seed, ...] = (0, 1)
    """Seeds from one to the next, instead of seed; each gives its image 0."""
    classes: tuple[str, ...] = ()
    """Class names or numbers to draw, a row each; none given: the first four."""
    to_class: str | None = None
    """Class at the last seed: the class embedding goes there in a straight line."""
    frames: Annotated[int, Ge(2), Le(10_000)] = 9
    """Pictures from one seed to the next, both included."""
    out: FilePath | None = None
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

    num_samples: NumImages = 50000
    """Number of images."""
    labels: Literal["random", "balanced"] = "random"
    """Uniformly drawn labels (the ADM protocol), or label i modulo the number of classes."""
    classes: tuple[str, ...] = ()
    """Class names or numbers to draw from; none given: all."""
    labels_file: FilePath | None = None
    """File with one class name or number per image, instead of labels and classes."""
    indices: tuple[Annotated[int, Ge(0), Lt(10**8)], ...] = ()
    """Numbers of the images to make, to the bit those of the whole set; none given: all."""
    png: bool = False
    """Also write every image as a PNG, in the folder `images` beside the archive."""
    out: FilePath | None = None
    """Folder to write to; None: samples/STEP_N beside the checkpoints, STEP_N_images of indices."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels_file is not None and (self.classes or self.labels != "random"):
            raise UserError("labels_file stands for labels and classes; drop these")
        if self.indices and max(self.indices) >= self.num_samples:
            raise UserError(
                f"indices {max(self.indices)} must be below num_samples {self.num_samples}"
            )
        if len(set(self.indices)) < len(self.indices):
            raise UserError("indices name an image twice; give each once")


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
    if config.sde.last_step == "none":
        if config.sde.last_step_size not in (0, SdeConfig.last_step_size):
            raise UserError("sde.last_step_size has no effect with sde.last_step none")
    elif config.sde.last_step_size < SMALLEST_LAST_STEP:
        raise UserError(
            f"sde.last_step_size {config.sde.last_step_size:g} must be at least "
            f"{SMALLEST_LAST_STEP}, what fp32 tells from no step; sde.last_step none has none"
        )
    check_interval(config.guidance, "guidance.interval")


def check_interval(guidance: GuidanceConfig, option: str) -> None:
    """Refuses an interval upside down or, in t, outside of 0 and 1."""
    low, high = guidance.interval
    if not low <= high:  # also where one is no number
        raise UserError(f"{option} {low:g} {high:g} is upside down; give low, then high")
    if guidance.interval_unit == "t" and not 0 <= low <= high <= 1:
        raise UserError(f"{option} {low:g} {high:g} must lie within 0 and 1")


def check_picture(out: str | None) -> None:
    """Refuses a file name of no kind in `PICTURES`."""
    if out and not out.lower().endswith(PICTURES):
        raise UserError(f"out {out} must end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
