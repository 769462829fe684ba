"""Kernel distance of features, KID on Inception's (Binkowski et al., 2018)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from sit_vit5.metrics.features import POOL
from sit_vit5.metrics.metric import FeatureSet, Metric, default_device
from sit_vit5.metrics.statistics import Features, check_widths, rows_of
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.progress import progress_bar

# torch-fidelity's defaults, its draws of subsets too: its value is ours.
SUBSETS, SUBSET_SIZE, SEED = 100, 1000, 2020
FEWEST = 2  # an unbiased mean over pairs
# Rows of a kernel matrix at a time: 80 MB against 10,000 columns.
BLOCK = 1024


@dataclass(frozen=True)
class KernelDistance:
    """value: mean over subsets; unbiased, so that it may be negative, and comparable between any
    numbers of images. deviation: over subsets; standard_error: of the value, None if unknown.
    """

    value: float
    deviation: float
    standard_error: float | None


def kernel_distance(
    *,
    samples: Features,
    reference: Features,
    subsets: int = SUBSETS,
    subset_size: int = SUBSET_SIZE,
    seed: int = SEED,
) -> KernelDistance:
    """Unbiased squared MMD with kernel (x.y / D + 1)^3, mean over random subsets, in fp64.

    Features: (N, D). Fewer images than `subset_size` make the subsets smaller.
    """
    samples, reference = rows_of(samples, "samples"), rows_of(reference, "reference")
    check_widths(samples.shape[1], reference.shape[1])
    fewest = min(len(samples), len(reference))
    if fewest < FEWEST:
        raise UserError(f"a kernel distance needs {FEWEST} images of each set, found {fewest}")
    size = min(subset_size, fewest)
    rng = np.random.RandomState(seed)
    draws = [
        tuple(rng.choice(len(rows), size, replace=False) for rows in (samples, reference))
        for _ in range(subsets)
    ]
    values = []
    with progress_bar(subsets, unit="subset", title="kernel distance") as bar:
        for group in _groups(draws, len(samples), len(reference)):
            values.append(_distances(samples, reference, group))
            bar.update(len(group))
    values = np.concatenate(values)
    error = _standard_error(values, size=size, count=fewest)
    return KernelDistance(float(values.mean()), float(values.std()), error)


def _groups(draws: list, n: int, m: int) -> Iterator[list]:
    """Subsets of n and m rows whose kernels are computed together: all, or one by one if that is
    fewer pairs of rows, as of 50,000 samples and 10,000 reference images: a tenth."""
    if n**2 + m**2 + n * m <= 3 * len(draws) * len(draws[0][0]) ** 2:
        yield draws
    else:
        yield from ([draw] for draw in draws)


def _distances(samples: np.ndarray, reference: np.ndarray, draws: list) -> np.ndarray:
    """The squared MMD of each pair of subsets, (len(draws),)."""
    size = len(draws[0][0])
    (x, in_x), (y, in_y) = (
        _members(rows, [draw[side] for draw in draws])
        for side, rows in enumerate((samples, reference))
    )
    within = _kernel_sums(x, x, in_x, in_x, others_only=True)
    within += _kernel_sums(y, y, in_y, in_y, others_only=True)
    between = _kernel_sums(x, y, in_x, in_y)
    return (within / (size * (size - 1)) - 2 * between / size**2).cpu().numpy()


def _members(rows: np.ndarray, draws: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that any subset holds, (n, D), and 1 where subset b holds row i, (n, b); fp64."""
    used = np.unique(np.concatenate(draws))
    held = np.zeros((len(used), len(draws)))
    for number, draw in enumerate(draws):
        held[np.searchsorted(used, draw), number] = 1
    device = default_device()
    taken = torch.from_numpy(np.asarray(rows[used], np.float64))
    return taken.to(device), torch.from_numpy(held).to(device)


def _kernel_sums(
    x: torch.Tensor,
    y: torch.Tensor,
    in_x: torch.Tensor,
    in_y: torch.Tensor,
    *,
    others_only: bool = False,
) -> torch.Tensor:
    """For each subset the sum of the kernel over its pairs; others_only: of different rows."""
    sums = torch.zeros(in_x.shape[1], dtype=torch.float64, device=x.device)
    for start in range(0, len(x), BLOCK):
        rows = slice(start, start + BLOCK)
        values = kernel(x[rows], y)
        if others_only:
            values.diagonal(start).zero_()
        sums += ((values @ in_y) * in_x[rows]).sum(0)
    return sums


def kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(x.y / D + 1)^3 of all pairs of rows, (n, m)."""
    return (x @ y.T / x.shape[1] + 1) ** 3


def _standard_error(values: np.ndarray, *, size: int, count: int) -> float | None:
    """Of the mean over subsets that share images: subsets of `size` out of `count`.

    A subset's variance is that of `size` independent images less the part size / count that it
    shares with the others; the mean over many subsets varies as `count` images do. The smaller set
    counts for both, which errs on the safe side.
    """
    if count == size or len(values) < 2:
        return None
    return float(values.std(ddof=1) * np.sqrt(size / (count - size) + 1 / len(values)))


def _of(samples: FeatureSet, reference: FeatureSet) -> dict[str, float | None]:
    found = kernel_distance(samples=samples.rows[POOL], reference=reference.rows[POOL])
    return {
        "kernel_distance": found.value,
        "kernel_distance_deviation": found.deviation,
        "kernel_distance_standard_error": found.standard_error,
    }


KID = Metric(POOL, "rows", "rows", {"kernel_distance": "KID"}, _of, fewest=FEWEST)
