"""Distributions of t in training, and the intervals of t in training and sampling."""

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


EPS = 1e-3
EPS_VP_TRAINING = 1e-5

Interval = tuple[float, float]


def training_interval(interpolant: str, prediction: str, *, eps: float | None = None) -> Interval:
    """(lowest, highest) t of training. eps: distance from a singular end; None: as published."""
    if interpolant == "vp":
        return 0.0, 1 - (EPS_VP_TRAINING if eps is None else eps)
    if prediction == "velocity":
        return 0.0, 1.0
    eps = EPS if eps is None else eps
    return eps, 1 - eps


def sampling_interval(
    interpolant: str,
    prediction: str,
    *,
    eps: float | None = None,
    diffusion: str | None = None,
    last_step_size: float = 0.0,
) -> Interval:
    """(start, end) t of a solver; an SDE, diffusion given, ends last_step_size before 1."""
    eps = EPS if eps is None else eps
    regular = interpolant != "vp" and prediction == "velocity"
    start = 0.0 if interpolant == "vp" or (regular and diffusion != "sbdm") else eps
    end = 1.0 if regular else 1 - eps
    if diffusion is not None and last_step_size:
        end = 1 - last_step_size
    return start, end
