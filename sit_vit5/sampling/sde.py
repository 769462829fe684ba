"""SDE solvers with the score: dx = (velocity + w score) dt + sqrt(2 w) dW (SiT, section 2.4).

w_t >= 0 is the diffusion coefficient; any choice keeps the densities of the ODE. Beware of two
conventions: SiT's paper writes w/2 in the drift and sqrt(w) before the noise, its code, as here, w
and sqrt(2 w). The network is asked once per evaluation. A new coefficient, solver or last step is
one function and one line in `DIFFUSIONS`, `SDE_SOLVERS` or `LAST_STEPS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sit_vit5.flow.interpolants import INTERPOLANTS, Coefficients
from sit_vit5.sampling.field import Field
from sit_vit5.sampling.ode import Observer, ignore

# (t, coefficients of the path at t, norm) -> w_t; 0-dimensional tensors
Diffusion = Callable[[Tensor, Coefficients, float], Tensor]

DIFFUSIONS: dict[str, Diffusion] = {
    "constant": lambda t, p, norm: torch.full_like(t, norm),
    # The coefficient of score-based models (Song et al., 2021); infinite where alpha is 0.
    "sbdm": lambda t, p, norm: norm * p.variance_rate,
    "sigma": lambda t, p, norm: norm * p.sigma_t,
    "linear": lambda t, p, norm: norm * (1 - t),
    "decreasing": lambda t, p, norm: 0.25 * (norm * torch.cos(math.pi * t) + 1) ** 2,
    "increasing-decreasing": lambda t, p, norm: norm * torch.sin(math.pi * t) ** 2,
}


@dataclass(frozen=True)
class Sde:
    """A field with its diffusion coefficient."""

    field: Field
    diffusion: str
    norm: float = 1.0

    def coefficient(self, t: float) -> float:
        """w_t."""
        time = torch.tensor(t, dtype=torch.float64)
        path = INTERPOLANTS[self.field.flow.interpolant](time)
        return float(DIFFUSIONS[self.diffusion](time, path, self.norm))

    def drift(self, x_t: Tensor, t: float) -> Tensor:
        """velocity + w_t score."""
        velocity, score = self.field.velocity_and_score(x_t, t)
        return velocity + self.coefficient(t) * score

    def noised(self, x_t: Tensor, t: float, step: float, noise: Tensor) -> Tensor:
        """x_t plus the increment of the noise term."""
        return x_t + math.sqrt(2 * self.coefficient(t) * step) * noise


# step number -> standard normal noise of x's shape
StepNoise = Callable[[int], Tensor]


def euler_maruyama(
    sde: Sde, x_t: Tensor, times: Sequence[float], noise: StepNoise, *, observe: Observer = ignore
) -> Tensor:
    """x + drift h + sqrt(2 w h) noise: strong order 1/2, one evaluation per step."""
    for number, (t, t_next) in enumerate(pairwise(times)):
        step = t_next - t
        drift = sde.drift(x_t, t)
        x_t = sde.noised(x_t, t, step, noise(number)) + step * drift
        observe(x_t, t_next)
    return x_t


def stochastic_heun(
    sde: Sde, x_t: Tensor, times: Sequence[float], noise: StepNoise, *, observe: Observer = ignore
) -> Tensor:
    """Noise first, then the trapezoid of both drifts: two evaluations per step. SiT's code."""
    for number, (t, t_next) in enumerate(pairwise(times)):
        step = t_next - t
        x_t = sde.noised(x_t, t, step, noise(number))
        drift = sde.drift(x_t, t)
        x_t = x_t + step / 2 * (drift + sde.drift(x_t + step * drift, t_next))
        observe(x_t, t_next)
    return x_t


def mean_step(sde: Sde, x_t: Tensor, t: float, step: float) -> Tensor:
    """The drift without noise."""
    return x_t + step * sde.drift(x_t, t)


def euler_step(sde: Sde, x_t: Tensor, t: float, step: float) -> Tensor:
    """A step of the ODE."""
    return x_t + step * sde.field(x_t, t)


def tweedie_step(sde: Sde, x_t: Tensor, t: float, step: float) -> Tensor:
    """The expected data, (x_t + sigma^2 score) / alpha (Efron, 2011); whatever the step."""
    path = INTERPOLANTS[sde.field.flow.interpolant](torch.tensor(t, dtype=torch.float64))
    alpha_t, sigma_t = float(path.alpha_t), float(path.sigma_t)
    return x_t / alpha_t + sigma_t**2 / alpha_t * sde.field.score(x_t, t)


SDE_SOLVERS = {"euler_maruyama": euler_maruyama, "stochastic_heun": stochastic_heun}
# Evaluations per step.
SDE_STAGES = {"euler_maruyama": 1, "stochastic_heun": 2}
LAST_STEPS = {"mean": mean_step, "euler": euler_step, "tweedie": tweedie_step}
