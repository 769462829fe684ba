"""Power-function averages of the weights, and how one is made of others: no weights in here.

After T steps the average of shape gamma weighs step t as t^gamma: its profile on (0, T] is

    p(t) = (gamma + 1) t^gamma / T^(gamma + 1)

The weights of step t count for the interval (t - 1, t], over which they did not change. Karras et
al., "Analyzing and Improving the Training Dynamics of Diffusion Models" (2024), section 3 and
appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Profile:
    """An average of relative width `width` after `step` optimizer steps."""

    step: int
    width: float


@dataclass(frozen=True)
class Combination:
    """Coefficients of the profiles, which sum to 1, and |their sum - target| / |target|."""

    coefficients: tuple[float, ...]
    residual: float


def shape_of(width: float) -> float:
    """gamma of a relative width (standard deviation of the profile over T), in (0, 12^-0.5).

    The root above -1/2 of gamma^3 + 7 gamma^2 + (16 - width^-2) gamma + 12 - width^-2.
    """
    inverse = width**-2
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


def width_of(shape: float) -> float:
    """The relative width of gamma: (gamma + 1)^(1/2) (gamma + 2)^(-1) (gamma + 3)^(-1/2)."""
    return (shape + 1) ** 0.5 / (shape + 2) / (shape + 3) ** 0.5


def decay_at(shape: float, step: int) -> float:
    """beta_t = (1 - 1/t)^(gamma + 1) for the update after optimizer step `step` = t - 1."""
    return (step / (step + 1)) ** (shape + 1)


def combine(stored: list[Profile], target: Profile) -> Combination:
    """The combination of stored profiles nearest to the target in the mean square over t."""
    if target in stored:
        return Combination(tuple(float(profile == target) for profile in stored), 0.0)
    products, towards = _inner_products(stored, stored), _inner_products(stored, [target])[:, 0]
    norms = np.sqrt(np.diag(products))  # those of early, narrow profiles are large
    sides = np.stack([towards, np.ones(len(stored))], axis=1) / norms[:, None]
    solved = np.linalg.lstsq(products / np.outer(norms, norms), sides, rcond=None)[0]
    free, correction = (solved / norms[:, None]).T
    # Lagrange: coefficients that sum to 1 keep weights that never moved.
    found = free + correction * (1 - free.sum()) / correction.sum()
    square = _inner_products([target], [target])[0, 0]
    error = found @ products @ found - 2 * found @ towards + square
    return Combination(tuple(found.tolist()), float(np.sqrt(max(error, 0) / square)))


def _inner_products(first: list[Profile], second: list[Profile]) -> np.ndarray:
    """Integrals of p q over t, (len(first), len(second)):

    (gamma_p + 1) (gamma_q + 1) / (gamma_p + gamma_q + 1) (T / T')^gamma' / T'

    where T' is the later end, of gamma', and T the earlier one.
    """
    step_p, step_q = np.array([p.step for p in first])[:, None], np.array([q.step for q in second])
    shape_p = np.array([shape_of(p.width) for p in first])[:, None]
    shape_q = np.array([shape_of(q.width) for q in second])
    later = np.maximum(step_p, step_q)
    ratio = np.minimum(step_p, step_q) / later
    scale = (shape_p + 1) * (shape_q + 1) / (shape_p + shape_q + 1) / later
    return scale * ratio ** np.where(step_p > step_q, shape_p, shape_q)
