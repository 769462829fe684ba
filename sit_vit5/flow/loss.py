"""The training loss per sample, and class dropout."""

from __future__ import annotations

from torch import Tensor, nn

from sit_vit5.flow.interpolants import interpolate


def flow_loss(
    model: nn.Module,
    latents: Tensor,
    *,
    noise: Tensor,
    t: Tensor,
    labels: Tensor | None,
    interpolant: str,
) -> Tensor:
    """Mean squared error of the predicted velocity, (B,), fp32. SiT, eq. 6."""
    x_t, target = interpolate(interpolant, latents, noise, t)
    prediction = model(x_t, t, labels)
    return (prediction.float() - target).square().flatten(1).mean(1)


def drop_labels(labels: Tensor, u: Tensor, *, class_dropout: float, null_label: int) -> Tensor:
    """The labels with null_label where u < class_dropout. labels, u: (B,); u uniform in [0, 1).

    Decided once per sample outside the model, so that no part of it can see a dropped label.
    """
    return labels.masked_fill(u < class_dropout, null_label)
