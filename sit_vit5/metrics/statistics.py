"""Mean and covariance of features: streaming, mergeable, independent of the batch size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
    def of(features: np.ndarray) -> Statistics:
        """Statistics of the rows of features (N, D), in fp64."""
        features = np.asarray(features, np.float64)
        mean = features.mean(axis=0)
        centred = features - mean
        return Statistics(len(features), mean, centred.T @ centred)

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
