"""What a solver integrates: velocity and score of a network under guidance, and what they cost."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sit_vit5.flow.predictions import Flow
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.precision import autocast

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
