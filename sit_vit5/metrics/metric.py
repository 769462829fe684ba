"""The interface of a metric, and the device of features and distances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from sit_vit5.metrics.statistics import Gaussian, Statistics


def default_device() -> torch.device:
    """The process's CUDA device if there is one, else the CPU: both compute true fp32 and fp64."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


Need = Literal["rows", "statistics"]


@dataclass(frozen=True)
class FeatureSet:
    """A set of images as metrics see it, by output of the extractor.

    rows: features (N, D), may be memory maps; statistics: mean and covariance.
    """

    rows: Mapping[str, np.ndarray] = field(default_factory=dict)
    statistics: Mapping[str, Gaussian | Statistics] = field(default_factory=dict)

    def has(self, need: Need, output: str) -> bool:
        """Whether a metric that needs rows or statistics of an output can be had."""
        return output in (self.rows if need == "rows" else self.statistics)


@dataclass(frozen=True)
class Metric:
    """output: of the extractor; samples, reference: what is needed of each, None for nothing.

    names: result key -> name in tables. function: (samples, reference) -> the named numbers; those
    that do not exist, such as a spread over one subset, are None. fewest: images of each set.
    """

    output: str
    samples: Need
    reference: Need | None
    names: Mapping[str, str]
    function: Callable[[FeatureSet, FeatureSet], dict[str, float | None]]
    fewest: int = 1
