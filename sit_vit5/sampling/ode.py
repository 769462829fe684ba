"""Fixed-step ODE solvers: pure functions of a velocity field, noise and a grid of times.

A new solver is one function and one line in `SAMPLERS`. The state stays fp32: bf16 sums over many
steps decay to noise (row S11).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor

# (x_t, t) -> dx_t / dt
Field = Callable[[Tensor, float], Tensor]


def euler(field: Field, x_t: Tensor, times: Sequence[float]) -> Tensor:
    """x + h v(x, t): first order, one evaluation per step."""
    for t, t_next in pairwise(times):
        x_t = x_t + (t_next - t) * field(x_t, t)
    return x_t


def heun(field: Field, x_t: Tensor, times: Sequence[float]) -> Tensor:
    """The explicit trapezoid (torchdiffeq's heun2): second order, two evaluations per step."""
    for t, t_next in pairwise(times):
        step = t_next - t
        slope = field(x_t, t)
        slope_next = field(x_t + step * slope, t_next)
        x_t = x_t + step * (slope + slope_next) / 2
    return x_t


SAMPLERS = {"euler": euler, "heun": heun}


def uniform_grid(num_steps: int) -> list[float]:
    """num_steps intervals from t = 0 (noise) to t = 1 (data): num_steps + 1 times."""
    return [step / num_steps for step in range(num_steps + 1)]
