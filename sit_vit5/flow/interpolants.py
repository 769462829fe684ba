"""Interpolants x_t = alpha_t * data + sigma_t * noise; t = 0 is noise, t = 1 is data.

SiT (Ma et al., 2024), section 2; its paper runs t the other way, its code this way.
A new path is one class and one line in `INTERPOLANTS`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Coefficients:
    """alpha_t, sigma_t and their derivatives by t, each of t's shape."""

    alpha_t: Tensor
    sigma_t: Tensor
    d_alpha_t: Tensor
    d_sigma_t: Tensor


class Linear:
    """alpha_t = t, sigma_t = 1 - t."""

    def __call__(self, t: Tensor) -> Coefficients:
        one = torch.ones_like(t)
        return Coefficients(alpha_t=t, sigma_t=1 - t, d_alpha_t=one, d_sigma_t=-one)


INTERPOLANTS = {"linear": Linear()}


def interpolate(name: str, latents: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """(x_t, velocity) at t. latents, noise: (B, ...); t: (B,) in [0, 1]. SiT, eqs. 1 and 3."""
    path = INTERPOLANTS[name](t.reshape(-1, *[1] * (latents.ndim - 1)))
    x_t = path.alpha_t * latents + path.sigma_t * noise
    velocity = path.d_alpha_t * latents + path.d_sigma_t * noise
    return x_t, velocity
