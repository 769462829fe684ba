"""The options of what is looked at while a run trains: grids, metrics, watchdogs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from sit_vit5.fields import BatchSize, FilePath, GuidanceScale, Interval


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
