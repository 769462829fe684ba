"""Where a path may be used: near its ends some predictions divide by zero.

The distances are those of SiT's code (transport.py): 1e-3, in training on the vp path 1e-5, and 0
for velocity on the linear and gvp paths. Unlike there each distance is decided by its own argument,
a reversed interval is (t1, t0) on every path, and sbdm keeps off t = 0, where it is infinite.
"""

from __future__ import annotations

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
