"""Velocity and score of a network under guidance, which a solver integrates, and their cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from sit_vit5.flow.interpolants import INTERPOLANTS
from sit_vit5.flow.predictions import Flow
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.precision import autocast

# (x_t (B, C, h, w), t) -> the network's prediction, guided or not
Predict = Callable[[Tensor, float], Tensor]


class Network:
    """A denoiser in a precision that counts its passes per image."""

    def __init__(self, model: Denoiser, *, precision: str = "fp32"):
        self.model, self.precision, self.passes = model, precision, 0

    def __call__(self, x_t: Tensor, t: float, labels: Tensor) -> Tensor:
        """The prediction for (B, C, h, w), or for a stack of k such batches, labels (k B,)."""
        repeats = len(labels) // len(x_t)
        self.passes += repeats
        times = torch.full((len(labels),), t, dtype=torch.float32, device=x_t.device)
        with autocast(x_t.device, self.precision):
            output = self.model(x_t.repeat(repeats, 1, 1, 1), times, labels)
        return output[:, : x_t.shape[1]]  # an official DiT's variances come after


class Field:
    """Velocity, score and data at (x_t, t), from one evaluation of the prediction; counts them.

    x_t: (B, C, h, w), fp32; t: one time for the batch.
    """

    def __init__(self, predict: Predict, flow: Flow):
        self.predict, self.flow, self.evaluations = predict, flow, 0

    def __call__(self, x_t: Tensor, t: float) -> Tensor:
        """dx_t / dt of the probability flow."""
        output, times = self._evaluate(x_t, t)
        return self.flow.velocity(output, x_t, times)

    def velocity_and_score(self, x_t: Tensor, t: float) -> tuple[Tensor, Tensor]:
        """Both from one evaluation (SiT's code takes two); sigma_t must not be 0."""
        output, times = self._evaluate(x_t, t)
        return self.flow.velocity(output, x_t, times), self.flow.score(output, x_t, times)

    def score(self, x_t: Tensor, t: float) -> Tensor:
        """Gradient of the log density; sigma_t must not be 0."""
        output, times = self._evaluate(x_t, t)
        return self.flow.score(output, x_t, times)

    def data(self, x_t: Tensor, t: float) -> Tensor:
        """The data expected where x_t is seen at t: the denoised image."""
        output, times = self._evaluate(x_t, t)
        return self.flow.data(output, x_t, times)

    def _evaluate(self, x_t: Tensor, t: float) -> tuple[Tensor, Tensor]:
        self.evaluations += 1
        times = torch.full((len(x_t),), t, dtype=x_t.dtype, device=x_t.device)
        return self.predict(x_t, t), times


# place in the interval, 0 to 1 -> factor of (scale - 1); each has the mean 1 (Wang et al., 2024)
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda place: 1.0,
    "linear": lambda place: 2 * place,
    "cosine": lambda place: 1 - math.cos(math.pi * place),
}


@dataclass(frozen=True)
class Guidance:
    """scale 1 is off; channels: guided ones from the first, None: all; interval: (low, high) in t;
    schedule: how the scale changes over the interval.

    steps: instead of the interval, the first and last solver step guided, in all their stages.
    """

    scale: float = 1.0
    channels: int | None = None
    interval: tuple[float, float] = (0.0, 1.0)
    schedule: str = "constant"
    steps: tuple[int, int] | None = None

    def scale_at(self, t: float, step: int = 0) -> float:
        """The scale at t, in the solver step: 1 outside the interval, whose ends belong to it."""
        (low, high), now = (self.interval, t) if self.steps is None else (self.steps, step)
        if not low <= now <= high:
            return 1.0
        place = (now - low) / (high - low) if high > low else 0.5
        return 1 + (self.scale - 1) * SCHEDULES[self.schedule](place)


def guided(
    network: Network,
    labels: Tensor,
    guidance: Guidance,
    *,
    reference: Network | None = None,
    stages: int = 1,
) -> Predict:
    """The prediction for labels (B,) under guidance. reference: a worse network, or None for the
    same one without a class; stages: evaluations per solver step, which count the steps."""
    null = (
        None
        if network.model.null_label is None
        else torch.full_like(labels, network.model.null_label)
    )

    calls = count()

    def predict(x_t: Tensor, t: float) -> Tensor:
        scale = guidance.scale_at(t, next(calls) // stages)
        if scale == 1:
            return network(x_t, t, labels)
        if reference is None:
            conditional, other = network(x_t, t, torch.cat([labels, null])).chunk(2)
        else:
            conditional, other = network(x_t, t, labels), reference(x_t, t, labels)
        k = guidance.channels
        pushed = other[:, :k] + scale * (conditional[:, :k] - other[:, :k])
        return pushed if k is None else torch.cat([pushed, conditional[:, k:]], dim=1)

    return predict


def guidance_scale_or_default(
    scale: float | None,
    *,
    class_names: tuple[str, ...],
    class_dropout: float,
    default: float = 2.0,
) -> float:
    """The scale, or where none is given the default, or 1 for a model without a null label.

    Refuses guidance towards a null label that training never showed.
    """
    guidable = bool(class_names) and class_dropout > 0
    if scale is None:
        return default if guidable else 1.0
    if scale != 1 and not guidable:
        reason = "has no classes" if not class_names else "was trained with class_dropout 0"
        raise UserError(f"guidance.scale {scale:g} is impossible: the model {reason}; use 1")
    return scale


def time_of_noise_level(level: float, interpolant: str) -> float:
    """t at which sigma_t / alpha_t is `level`, the sigma of EDM and of the interval papers."""
    if level < 0:
        raise UserError(f"noise level {level:g} must not be negative")
    low, high = 0.0, 1.0  # the ratio falls from infinity to 0
    for _ in range(60):
        middle = (low + high) / 2
        path = INTERPOLANTS[interpolant](torch.tensor(middle, dtype=torch.float64))
        if float(path.sigma_t) > level * float(path.alpha_t):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def interval_in_time(
    interval: tuple[float, float], unit: str, *, interpolant: str
) -> tuple[float, float]:
    """(low, high) in our t of an interval in t or in noise levels sigma."""
    low, high = interval
    if unit == "sigma":
        high, low = (time_of_noise_level(level, interpolant) for level in interval)
    if not 0 <= low <= high <= 1:
        raise UserError(
            f"guidance.interval {interval[0]:g} {interval[1]:g} ({unit}) is t {low:g} to {high:g}; "
            "it must rise within 0 to 1"
        )
    return low, high


def interval_in_steps(interval: tuple[float, float], steps: int | None) -> tuple[int, int]:
    """First and last of the solver's steps, counted from 0 at noise; steps None: it has no grid."""
    if steps is None:
        raise UserError("guidance.interval_unit step needs a fixed-step method")
    low, high = map(int, interval)
    if (low, high) != interval or not 0 <= low <= high < steps:
        raise UserError(
            f"guidance.interval {interval[0]:g} {interval[1]:g} must be steps in 0..{steps - 1}"
        )
    return low, high
