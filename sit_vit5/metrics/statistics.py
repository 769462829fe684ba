"""Mean and covariance of features, given as NumPy or torch arrays, whole or in batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from sit_vit5.utils.errors import UserError

# Features (N, D) of N images: one array, or an iterable of batches of them.
Array = np.ndarray | torch.Tensor
Features = Array | Iterable[Array]


def to_numpy(array: Array) -> np.ndarray:
    """A NumPy view or copy; bf16 and fp16 as fp32, since NumPy lacks the first."""
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu()
        if array.is_floating_point():
            array = array.to(torch.promote_types(array.dtype, torch.float32))
        return array.numpy()
    return np.asarray(array)


def batches_of(features: Features, what: str) -> Iterator[np.ndarray]:
    """Batches (B, D) of finite numbers, of which there is at least one."""
    whole = isinstance(features, np.ndarray | torch.Tensor)
    count = 0
    for batch in [features] if whole else features:
        rows = to_numpy(batch)
        if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.number):
            raise UserError(
                f"{what}: expected features (N, D), found {rows.dtype} {rows.shape}; flatten "
                "images, or pass them through an extractor"
            )
        if not np.isfinite(rows).all():
            raise UserError(f"{what}: features are not finite; check the images and the extractor")
        count += len(rows)
        yield rows if whole else rows.copy()  # a generator may fill one buffer again and again
    if not count:
        raise UserError(f"{what}: no features")


def rows_of(features: Features, what: str) -> np.ndarray:
    """All rows (N, D) in one array."""
    batches = list(batches_of(features, what))
    return batches[0] if len(batches) == 1 else np.concatenate(batches)


def check_widths(samples: int, reference: int) -> None:
    """Refuses features of different extractors."""
    if samples != reference:
        raise UserError(
            f"samples have {samples} features, the reference {reference}; it was made with another "
            "extractor"
        )


# Rows whose scatter is one matrix product. The cuts lie at its multiples, however rows arrive, so
# the statistics of the same rows are the same to the bit; and 1.28 million rows need 64 MB.
BLOCK = 4096


@dataclass(frozen=True)
class Gaussian:
    """mean (D,) and covariance (D, D), fp64, of a reference file that keeps no count."""

    mean: np.ndarray
    covariance: np.ndarray


@dataclass(frozen=True)
class Statistics:
    """count, mean (D,) and scatter (D, D), the sum of (x - mean)(x - mean)^T; all fp64."""

    count: int
    mean: np.ndarray
    scatter: np.ndarray

    @staticmethod
    def of(features: Features) -> Statistics:
        """Statistics of features (N, D), given whole or in batches of any size, in fp64."""
        moments = Moments()
        for rows in batches_of(features, "features"):
            moments.add(rows)
        return moments.statistics()

    def merge(self, other: Statistics) -> Statistics:
        """Statistics of both sets together (Chan et al., 1983): no cancellation of big sums."""
        count = self.count + other.count
        delta = other.mean - self.mean
        return Statistics(
            count,
            self.mean + delta * (other.count / count),
            self.scatter
            + other.scatter
            + np.outer(delta, delta) * (self.count * other.count / count),
        )

    @property
    def covariance(self) -> np.ndarray:
        """Unbiased covariance (D, D): divisor count - 1, as np.cov and ADM."""
        return self.scatter / max(self.count - 1, 1)


class Moments:
    """Statistics of rows that arrive in pieces of any size; holds `BLOCK` rows at most."""

    def __init__(self) -> None:
        self._whole: Statistics | None = None
        self._waiting: list[np.ndarray] = []
        self._count = 0

    def add(self, rows: np.ndarray) -> None:
        """The next rows, (N, D)."""
        for piece in self._cut(rows):
            self._waiting.append(piece)
            self._count += len(piece)
            if self._count == BLOCK:
                self._whole = self.statistics()
                self._waiting, self._count = [], 0

    def statistics(self) -> Statistics:
        """Statistics of all rows so far, of which there must be one."""
        if not self._waiting:
            assert self._whole is not None, "no rows"
            return self._whole
        rows = np.concatenate(self._waiting).astype(np.float64, copy=False)  # (n, D)
        mean = rows.mean(axis=0)
        rows = rows - mean
        block = Statistics(len(rows), mean, rows.T @ rows)
        return block if self._whole is None else self._whole.merge(block)

    def _cut(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        start = 0
        while start < len(rows):
            stop = start + BLOCK - self._count
            yield rows[start:stop]
            start = stop
