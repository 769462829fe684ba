"""Distributions of t in training, as maps of uniform numbers: one line in `TIMES` each."""

from __future__ import annotations

import torch
from torch import Tensor


def uniform(u: Tensor, mean: float, std: float) -> Tensor:
    """t = u."""
    del mean, std
    return u


def logit_normal(u: Tensor, mean: float, std: float) -> Tensor:
    """logit(t) ~ N(mean, std^2), by the inverse distribution function (Esser et al., 2024)."""
    # fp64: u of fp32 may round to 1, whose quantile is infinite; the sigmoid then gives 1.
    return torch.sigmoid(mean + std * torch.special.ndtri(u.double())).to(u.dtype)


TIMES = {"uniform": uniform, "logit_normal": logit_normal}


def shift_times(t: Tensor, shift: float) -> Tensor:
    """t / (t + shift (1 - t)): towards noise for shift > 1; 1 changes nothing.

    Stable Diffusion 3's shift for more pixels (Esser et al., 2024, eq. 23), whose time is 1 - t.
    """
    return t if shift == 1 else t / (t + shift * (1 - t))
