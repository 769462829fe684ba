"""The training loss per sample, and class dropout."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

from sit_vit5.flow.interpolants import Coefficients, coefficients
from sit_vit5.flow.predictions import PREDICTIONS


def _velocity(p: Coefficients, velocity_per_error: Tensor) -> Tensor:
    """The loss is the squared error of the velocity that the output implies."""
    return velocity_per_error**2


def _likelihood(p: Coefficients, velocity_per_error: Tensor) -> Tensor:
    """Bounds the likelihood (Song et al., 2021): the velocity's weight over the variance rate."""
    return velocity_per_error**2 / p.variance_rate


# (path at t, velocity error / error) -> factor of the squared error. SiT, transport.py.
WEIGHTS: dict[str, Callable[[Coefficients, Tensor], Tensor]] = {
    "velocity": _velocity,
    "likelihood": _likelihood,
}


def loss_weights(p: Coefficients, prediction: str, weights: str, bound: float | None) -> Tensor:
    """Factor of the squared error at each t, of p's shape.

    bound: largest factor of the error itself, so that of its square is at most bound^2. For data on
    the linear path, velocity error / error is 1 / (1 - t): 20 is JiT's 1 - t >= 0.05 (Li and He,
    2025). None: unbounded, and infinite at an end of some paths.
    """
    factor = WEIGHTS[weights](p, PREDICTIONS[prediction].velocity_per_error(p))
    if bound is None:
        return factor
    # inf / inf is an end where the weight is infinite too.
    return factor.nan_to_num(nan=math.inf, posinf=math.inf).clamp(max=bound**2)


def flow_loss(
    model: nn.Module,
    latents: Tensor,
    *,
    noise: Tensor,
    t: Tensor,
    labels: Tensor | None,
    interpolant: str,
    prediction: str = "velocity",
    weights: str = "none",
    weights_bound: float | None = None,
) -> Tensor:
    """Weighted mean squared error of the prediction, (B,), fp32. SiT, eqs. 6 and 7.

    latents, noise: (B, ...); t: (B,) in `flow.intervals.training_interval`; weights_bound: see
    `loss_weights`.
    """
    p, kind = coefficients(interpolant, t, latents), PREDICTIONS[prediction]
    x_t = p.alpha_t * latents + p.sigma_t * noise
    error = kind.error(model(x_t, t, labels).float(), latents, noise, p)
    loss = error.square().flatten(1).mean(1)
    if weights == "none":
        return loss
    return loss * loss_weights(p, prediction, weights, weights_bound).flatten()


def drop_labels(labels: Tensor, u: Tensor, *, class_dropout: float, null_label: int) -> Tensor:
    """The labels with null_label where u < class_dropout. labels, u: (B,); u uniform in [0, 1).

    Decided once per sample outside the model, so that no part of it can see a dropped label.
    """
    return labels.masked_fill(u < class_dropout, null_label)
