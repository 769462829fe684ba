"""Interpolants x_t = alpha_t * data + sigma_t * noise; t = 0 is noise, t = 1 is data.

SiT (Ma et al., 2024), section 2; its paper runs t the other way, its code this way.
A new path is one function and one line in `INTERPOLANTS`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Rate of the variance preserving path at data and at noise (Song et al., 2021).
BETA_MIN, BETA_MAX = 0.1, 20.0


@dataclass(frozen=True)
class Coefficients:
    """alpha_t, sigma_t, their derivatives by t, and sigma sigma', each of t's shape.

    sigma_d_sigma_t is apart because it stays finite where sigma' does not (vp at t = 1).
    """

    alpha_t: Tensor
    sigma_t: Tensor
    d_alpha_t: Tensor
    d_sigma_t: Tensor
    sigma_d_sigma_t: Tensor

    @property
    def variance_rate(self) -> Tensor:
        """(alpha' / alpha) sigma^2 - sigma sigma': the factor of the score in the velocity.

        Infinite where alpha is zero.
        """
        return self.d_alpha_t / self.alpha_t * self.sigma_t**2 - self.sigma_d_sigma_t

    @property
    def wronskian(self) -> Tensor:
        """alpha sigma' - alpha' sigma, below 0 on every path: x_t and the velocity determine data
        and noise."""
        return self.alpha_t * self.d_sigma_t - self.d_alpha_t * self.sigma_t


def linear(t: Tensor) -> Coefficients:
    """alpha_t = t, sigma_t = 1 - t."""
    one = torch.ones_like(t)
    return Coefficients(t, 1 - t, d_alpha_t=one, d_sigma_t=-one, sigma_d_sigma_t=t - 1)


def gvp(t: Tensor) -> Coefficients:
    """Generalised variance preserving: alpha_t = sin(pi t / 2), sigma_t = cos(pi t / 2).

    sigma_t is taken as sin(pi (1 - t) / 2), which is exactly 0 at t = 1.
    """
    half_turn = math.pi / 2
    alpha_t, sigma_t = torch.sin(half_turn * t), torch.sin(half_turn * (1 - t))
    return Coefficients(
        alpha_t,
        sigma_t,
        d_alpha_t=half_turn * sigma_t,
        d_sigma_t=-half_turn * alpha_t,
        sigma_d_sigma_t=-half_turn * alpha_t * sigma_t,
    )


def vp(t: Tensor) -> Coefficients:
    """Variance preserving diffusion run backwards, beta from 0.1 to 20.

    sigma_t by expm1: 1 - exp loses four digits near t = 1. sigma' goes to -infinity there.
    """
    s, span = 1 - t, BETA_MAX - BETA_MIN
    log_alpha = -0.25 * s**2 * span - 0.5 * s * BETA_MIN
    d_log_alpha = 0.5 * s * span + 0.5 * BETA_MIN
    alpha_t, sigma_t = log_alpha.exp(), (-torch.expm1(2 * log_alpha)).sqrt()
    d_alpha_t = alpha_t * d_log_alpha
    product = -alpha_t * d_alpha_t  # of alpha^2 + sigma^2 = 1
    return Coefficients(alpha_t, sigma_t, d_alpha_t, product / sigma_t, product)


INTERPOLANTS = {"linear": linear, "gvp": gvp, "vp": vp}


def coefficients(name: str, t: Tensor, like: Tensor) -> Coefficients:
    """The coefficients at t (B,), shaped to multiply a tensor like `like` (B, ...)."""
    return INTERPOLANTS[name](t.reshape(-1, *[1] * (like.ndim - 1)))
