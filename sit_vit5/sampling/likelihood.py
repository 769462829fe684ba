"""Log-likelihood by the instantaneous change of variables (Chen et al., 2018; SiT, appendix).

log p_1(x_1) = log N(x_0) - integral of div v along the ODE from data back to noise. The divergence
is estimated with Rademacher probes (Hutchinson, 1989), or exact with one probe per dimension. One
draw of the probes serves the whole trajectory: with new ones at every evaluation, as in SiT's code,
the right-hand side is no function of its arguments, and step control reacts to noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sit_vit5.config import ADAPTIVE_METHODS
from sit_vit5.sampling.ode import Velocity, tolerance_errors

# Where torchdiffeq calls a solver of ours by another name.
TORCHDIFFEQ_NAMES = {"heun": "heun2"}

# evaluation number -> probes (P, B, ...)
Probes = Callable[[int], Tensor]


@dataclass(frozen=True)
class Likelihood:
    """logp: log density in nats, (B,); noise: where the ODE ended, (B, ...)."""

    logp: Tensor
    noise: Tensor


def divergence(field: Velocity, x_t: Tensor, t: float, probes: Tensor) -> tuple[Tensor, Tensor]:
    """Velocity and the mean of probe * (d v / d x) probe over the probes, (B,)."""
    with torch.inference_mode(False), torch.enable_grad():
        x_t = x_t.detach().clone().requires_grad_()
        velocity = field(x_t, t)
        total = torch.zeros(len(x_t), dtype=x_t.dtype, device=x_t.device)
        for number, probe in enumerate(probes):
            (product,) = torch.autograd.grad(
                velocity, x_t, probe, retain_graph=number < len(probes) - 1
            )
            total = total + (product * probe).flatten(1).sum(1)
    return velocity.detach(), total / len(probes)


def log_likelihood(
    field: Velocity,
    data: Tensor,
    probes: Probes,
    *,
    interval: tuple[float, float],
    method: str,
    steps: int | None = None,
    atol: float = 1e-6,
    rtol: float = 1e-3,
) -> Likelihood:
    """Log density of data (B, ...) under the ODE. interval: (t of noise, t of data).

    method: our name or torchdiffeq's, adaptive with atol and rtol or fixed with `steps` intervals.
    The field's network must not be in inference mode.
    """
    from torchdiffeq import odeint

    evaluations = 0
    name, (start, end) = TORCHDIFFEQ_NAMES.get(method, method), interval

    def right_hand_side(s: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        nonlocal evaluations
        # fp32 as in SiT's code: at t = 1e-3 a rounding of s is 5e-5 of t, seen in the fifth digit.
        t = float(1 - s.float())
        velocity, total = divergence(field, state[0], t, probes(evaluations))
        evaluations += 1
        # s runs from data to noise: dx/ds = -v; the second entry gathers the divergence.
        return -velocity, total

    adaptive = method in ADAPTIVE_METHODS
    points = 2 if adaptive or steps is None else steps + 1
    s = torch.linspace(1 - end, 1 - start, points, dtype=torch.float64, device=data.device)
    options = {"step_t": s[-1:], "dtype": torch.float64} if adaptive else {}
    zeros = torch.zeros(len(data), dtype=data.dtype, device=data.device)
    with torch.no_grad(), tolerance_errors(name, atol, rtol):
        states, totals = odeint(
            right_hand_side, (data, zeros), s, method=name, atol=atol, rtol=rtol, options=options
        )
    noise = states[-1]
    prior = -0.5 * (noise.square() + math.log(2 * math.pi)).flatten(1).sum(1)
    return Likelihood(prior - totals[-1], noise)


def bits_per_dimension(logp: Tensor, dimensions: int, *, levels_per_unit: float = 127.5) -> Tensor:
    """Bits per dimension of grey levels, of which a unit of the data holds levels_per_unit.

    logp: nats of the data, dequantised by uniform noise of one level (Theis et al., 2016). Ours
    are grey / 127.5 - 1.
    """
    return -logp / dimensions / math.log(2) + math.log2(levels_per_unit)
