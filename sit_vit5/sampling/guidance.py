"""The velocity field that a solver integrates: a network, labels, guidance, and a count."""

from __future__ import annotations

import torch
from torch import Tensor

from sit_vit5.errors import UserError
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.precision import autocast


class VelocityField:
    """Velocity at (x_t, t) under classifier-free guidance on all channels (Ho and Salimans, 2022).

    v = v_null + scale * (v_class - v_null); scale 1 is the conditional velocity and costs half.
    Counts velocity evaluations and network passes per image.
    """

    def __init__(
        self, model: Denoiser, labels: Tensor, *, guidance_scale: float, precision: str = "fp32"
    ):
        if guidance_scale != 1 and model.null_label is None:
            raise UserError(
                f"guidance_scale {guidance_scale} needs a model with classes; this one is "
                "unconditional, use 1"
            )
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
