"""The training loss per sample, and class dropout."""

from __future__ import annotations

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
) -> Tensor:
    """Weighted mean squared error of the prediction, (B,), fp32. SiT, eqs. 6 and 7.

    latents, noise: (B, ...); t: (B,) in `flow.intervals.training_interval`.
    """
    p, kind = coefficients(interpolant, t, latents), PREDICTIONS[prediction]
    x_t = p.alpha_t * latents + p.sigma_t * noise
    error = kind.error(model(x_t, t, labels).float(), latents, noise, p)
    loss = error.square().flatten(1).mean(1)
    if weights == "none":
        return loss
    return loss * WEIGHTS[weights](p, kind.velocity_per_error(p)).flatten()


def drop_labels(labels: Tensor, u: Tensor, *, class_dropout: float, null_label: int) -> Tensor:
    """The labels with null_label where u < class_dropout. labels, u: (B,); u uniform in [0, 1).

    Decided once per sample outside the model, so that no part of it can see a dropped label.
    """
    return labels.masked_fill(u < class_dropout, null_label)
