"""ODE solvers: pure functions of a field, noise and times. A new one is one line in `SOLVERS`.

The state stays fp32: bf16 sums over many steps decay to noise. Times may run either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from sit_vit5.flow.times import shift_times
from sit_vit5.utils.errors import UserError

# (x_t, t) -> dx_t / dt
Velocity = Callable[[Tensor, float], Tensor]
# sees x_t and t after every step; of adaptive methods, every accepted one
Observer = Callable[[Tensor, float], None]


def ignore(x_t: Tensor, t: float) -> None:
    """The observer of those who want the end alone."""


@dataclass(frozen=True)
class Tableau:
    """An explicit Runge-Kutta method (Butcher, 1963): stage i is taken at t + c[i] h from the
    stages before it by the weights a[i]; b weighs all stages."""

    c: tuple[float, ...]
    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]


EULER = Tableau((0,), ((),), (1,))
MIDPOINT = Tableau((0, 1 / 2), ((), (1 / 2,)), (0, 1))
HEUN = Tableau((0, 1), ((), (1,)), (1 / 2, 1 / 2))
HEUN3 = Tableau((0, 1 / 3, 2 / 3), ((), (1 / 3,), (0, 2 / 3)), (1 / 4, 0, 3 / 4))
# Kutta's 3/8 rule, as torchdiffeq's rk4; the classical one differs by its own error.
RK4 = Tableau(
    (0, 1 / 3, 2 / 3, 1),
    ((), (1 / 3,), (-1 / 3, 1), (1, -1, 1)),
    (1 / 8, 3 / 8, 3 / 8, 1 / 8),
)


def runge_kutta(
    field: Velocity,
    x_t: Tensor,
    times: Sequence[float],
    *,
    tableau: Tableau,
    observe: Observer = ignore,
) -> Tensor:
    """x at the last of the times; one evaluation per stage and step."""
    for t, t_next in pairwise(times):
        step, slopes = t_next - t, []
        for node, weights in zip(tableau.c, tableau.a, strict=True):
            # The last node is the next time itself: t + (t_next - t) may round past 1.
            time = t_next if node == 1 else t + node * step
            slopes.append(field(_advance(x_t, step, weights, slopes), time))
        x_t = _advance(x_t, step, tableau.b, slopes)
        observe(x_t, t_next)
    return x_t


def adams_bashforth(
    field: Velocity, x_t: Tensor, times: Sequence[float], *, observe: Observer = ignore
) -> Tensor:
    """Second order from one evaluation per step: the slope extrapolated from the last two.

    Steps may differ; the first is Euler's (Hairer et al., 1993, III.5).
    """
    last, last_step = None, 0.0
    for t, t_next in pairwise(times):
        step, slope = t_next - t, field(x_t, t)
        if last is None:
            x_t = x_t + step * slope
        else:
            half_ratio = step / last_step / 2
            x_t = x_t + step * ((1 + half_ratio) * slope - half_ratio * last)
        last, last_step = slope, step
        observe(x_t, t_next)
    return x_t


def adaptive(
    field: Velocity, x_t: Tensor, interval: tuple[float, float], *, method: str, atol: float,
    rtol: float, observe: Observer = ignore,
) -> Tensor:  # fmt: skip
    """torchdiffeq's adaptive methods from the first to the second time.

    The last step ends exactly there: by itself torchdiffeq steps past the end, asks the network
    outside of [0, 1] and interpolates back. The error norm is over the batch, so an image depends
    on its batch mates at the level of the tolerances.
    """
    from torchdiffeq import odeint

    times = torch.tensor(interval, dtype=torch.float64, device=x_t.device)

    def slope(t: Tensor, x: Tensor) -> Tensor:
        return field(x, t.item())

    def accepted(t: Tensor, x: Tensor, step: Tensor) -> None:
        if t != times[0]:  # torchdiffeq shows where the step starts: the end of the one before
            observe(x, t.item())

    slope.callback_accept_step = accepted
    options = {"step_t": times[1:], "dtype": torch.float64}
    with tolerance_errors(method, atol, rtol):
        solution = odeint(slope, x_t, times, method=method, atol=atol, rtol=rtol, options=options)
    observe(solution[-1], interval[1])
    return solution[-1]


@contextmanager
def tolerance_errors(method: str, atol: float, rtol: float) -> Iterator[None]:
    """Turns torchdiffeq's assertion, that a step has shrunk to nothing, into a user's error."""
    try:
        yield
    except AssertionError as error:
        raise UserError(
            f"{method} cannot reach atol {atol:g}, rtol {rtol:g} in fp32 ({error}); use larger ones"
        ) from None


def uniform_grid(steps: int, interval: tuple[float, float] = (0.0, 1.0)) -> list[float]:
    """`steps` equal intervals: steps + 1 times."""
    start, end = interval
    return [start + (end - start) * step / steps for step in range(steps)] + [end]


def shifted_grid(steps: int, interval: tuple[float, float], shift: float) -> list[float]:
    """The uniform grid under `shift_times`, mapped back onto the interval."""
    start, end = interval
    if shift == 1:
        return uniform_grid(steps, interval)
    grid = [float(shift_times(t, shift)) for t in uniform_grid(steps)]
    return [start + (end - start) * t for t in grid[:-1]] + [end]


def _advance(x: Tensor, step: float, weights: Sequence[float], slopes: list[Tensor]) -> Tensor:
    for weight, slope in zip(weights, slopes, strict=True):
        if weight:
            x = x + step * weight * slope
    return x


# (field, x, times, observe=...) -> x; order and evaluations per step are in docs/mathematics.md
SOLVERS = {
    "euler": partial(runge_kutta, tableau=EULER),
    "midpoint": partial(runge_kutta, tableau=MIDPOINT),
    "heun": partial(runge_kutta, tableau=HEUN),
    "heun3": partial(runge_kutta, tableau=HEUN3),
    "rk4": partial(runge_kutta, tableau=RK4),
    "ab2": adams_bashforth,
}

# Evaluations per step.
STAGES = {"euler": 1, "midpoint": 2, "heun": 2, "heun3": 3, "rk4": 4, "ab2": 1}
