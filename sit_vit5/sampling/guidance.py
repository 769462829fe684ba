"""The velocity field that a solver integrates: a network, labels, guidance, and a count."""

from __future__ import annotations

import torch
from torch import Tensor

from sit_vit5.errors import UserError
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.precision import autocast


def guidance_scale_or_default(
    scale: float | None, *, class_names: tuple[str, ...], class_dropout: float
) -> float:
    """The scale, or where none is given the demo's 2, or 1 for a model without a null label.

    Refuses guidance towards a null label that training never showed.
    """
    guidable = bool(class_names) and class_dropout > 0
    if scale is None:
        return 2.0 if guidable else 1.0
    if scale != 1 and not guidable:
        reason = "has no classes" if not class_names else "was trained with class_dropout 0"
        raise UserError(f"guidance_scale {scale:g} is impossible: the model {reason}; use 1")
    return scale


class VelocityField:
    """Velocity at (x_t, t) under classifier-free guidance on all channels (Ho and Salimans, 2022).

    v = v_null + scale * (v_class - v_null); scale 1 is the conditional velocity and costs half.
    Counts velocity evaluations and network passes per image.
    """

    def __init__(
        self, model: Denoiser, labels: Tensor, *, guidance_scale: float, precision: str = "fp32"
    ):
        self.model, self.labels, self.precision = model, labels, precision
        self.guidance_scale = guidance_scale
        self.evaluations = self.passes = 0

    def __call__(self, x_t: Tensor, t: float) -> Tensor:
        """Velocity (B, C, h, w) in fp32 at one time for the whole batch."""
        self.evaluations += 1
        if self.guidance_scale == 1:
            return self._predict(x_t, t, self.labels)
        null = torch.full_like(self.labels, self.model.null_label)
        both = self._predict(torch.cat([x_t, x_t]), t, torch.cat([self.labels, null]))
        v_class, v_null = both.chunk(2)
        return v_null + self.guidance_scale * (v_class - v_null)

    def _predict(self, x_t: Tensor, t: float, labels: Tensor) -> Tensor:
        self.passes += len(x_t) // len(self.labels)
        times = torch.full((len(x_t),), t, dtype=torch.float32, device=x_t.device)
        with autocast(x_t.device, self.precision):
            return self.model(x_t, times, labels)
