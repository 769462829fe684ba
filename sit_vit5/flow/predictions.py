"""Predictions of a network, and the velocity, score and data that each implies.

With x_t = alpha * data + sigma * noise, a data-noise pair that fits x_t and the prediction gives
all others: velocity = alpha' * data + sigma' * noise, score = -noise / sigma (SiT, section 2.3).
A new prediction is one class and one line in `PREDICTIONS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sit_vit5.flow.interpolants import Coefficients, coefficients


class Prediction(Protocol):
    """error: what the loss squares; velocity and noise: what an output at x_t implies;
    velocity_per_error: how much the implied velocity changes with the error, of p's shape."""

    def error(self, output: Tensor, latents: Tensor, noise: Tensor, p: Coefficients) -> Tensor: ...

    def velocity(self, output: Tensor, x_t: Tensor, p: Coefficients) -> Tensor: ...

    def noise(self, output: Tensor, x_t: Tensor, p: Coefficients) -> Tensor: ...

    def velocity_per_error(self, p: Coefficients) -> Tensor: ...


class Velocity:
    """alpha' * data + sigma' * noise. SiT, eq. 3."""

    def error(self, output: Tensor, latents: Tensor, noise: Tensor, p: Coefficients) -> Tensor:
        return output - (p.d_alpha_t * latents + p.d_sigma_t * noise)

    def velocity(self, output: Tensor, x_t: Tensor, p: Coefficients) -> Tensor:
        return output

    def noise(self, output: Tensor, x_t: Tensor, p: Coefficients) -> Tensor:
        return (p.alpha_t * output - p.d_alpha_t * x_t) / p.wronskian

    def velocity_per_error(self, p: Coefficients) -> Tensor:
        return torch.ones_like(p.alpha_t)


class Noise:
    """The noise, as DDPM and DiT predict it; says nothing of the data where alpha is 0."""

    def error(self, output: Tensor, latents: Tensor, noise: Tensor, p: Coefficients) -> Tensor:
        return output - noise

    def velocity(self, output: Tensor, x_t: Tensor, p: Coefficients) -> Tensor:
        return p.d_alpha_t / p.alpha_t * x_t + self.velocity_per_error(p) * output

    def noise(self, output: Tensor, x_t: Tensor, p: Coefficients) -> Tensor:
        return output

    def velocity_per_error(self, p: Coefficients) -> Tensor:
        return p.d_sigma_t - p.d_alpha_t / p.alpha_t * p.sigma_t


class Score:
    """The gradient of the log density, -noise / sigma; its loss is that of the noise."""

    def error(self, output: Tensor, latents: Tensor, noise: Tensor, p: Coefficients) -> Tensor:
        return p.sigma_t * output + noise

    def velocity(self, output: Tensor, x_t: Tensor, p: Coefficients) -> Tensor:
        return p.d_alpha_t / p.alpha_t * x_t + p.variance_rate * output

    def noise(self, output: Tensor, x_t: Tensor, p: Coefficients) -> Tensor:
        return -p.sigma_t * output

    def velocity_per_error(self, p: Coefficients) -> Tensor:
        return p.d_alpha_t / p.alpha_t * p.sigma_t - p.d_sigma_t


class Data:
    """The data; says nothing of the noise where sigma is 0."""

    def error(self, output: Tensor, latents: Tensor, noise: Tensor, p: Coefficients) -> Tensor:
        return output - latents

    def velocity(self, output: Tensor, x_t: Tensor, p: Coefficients) -> Tensor:
        return p.d_alpha_t * output + p.d_sigma_t * self.noise(output, x_t, p)

    def noise(self, output: Tensor, x_t: Tensor, p: Coefficients) -> Tensor:
        return (x_t - p.alpha_t * output) / p.sigma_t

    def velocity_per_error(self, p: Coefficients) -> Tensor:
        return p.d_alpha_t - p.d_sigma_t / p.sigma_t * p.alpha_t


PREDICTIONS: dict[str, Prediction] = {
    "velocity": Velocity(),
    "noise": Noise(),
    "score": Score(),
    "data": Data(),
}


@dataclass(frozen=True)
class Flow:
    """A path and what the network predicts on it: turns outputs into velocity, score and data.

    output, x_t: (B, ...); t: (B,), inside the interval of `flow.intervals`.
    """

    interpolant: str
    prediction: str

    def velocity(self, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """dx_t / dt of the probability flow. SiT, eq. 2."""
        p = coefficients(self.interpolant, t, x_t)
        return PREDICTIONS[self.prediction].velocity(output, x_t, p)

    def score(self, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Gradient of the log density of x_t; sigma_t must not be 0."""
        if self.prediction == "score":
            return output
        p = coefficients(self.interpolant, t, x_t)
        return -PREDICTIONS[self.prediction].noise(output, x_t, p) / p.sigma_t

    def data(self, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """The expected data: the data that goes with x_t and the velocity, also where alpha_t is 0
        and the velocity is finite."""
        if self.prediction == "data":
            return output
        p = coefficients(self.interpolant, t, x_t)
        velocity = PREDICTIONS[self.prediction].velocity(output, x_t, p)
        return (p.d_sigma_t * x_t - p.sigma_t * velocity) / p.wronskian
