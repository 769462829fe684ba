"""Inception Score (Salimans et al., 2016) by ADM's rule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sit_vit5.metrics.features import LOGITS
from sit_vit5.metrics.metric import FeatureSet, Metric
from sit_vit5.metrics.statistics import Features, rows_of

SPLIT_SIZE = 5000


@dataclass(frozen=True)
class InceptionScore:
    """value: the mean of the splits' scores, each at least 1; higher is better."""

    value: float
    splits: tuple[float, ...]

    @property
    def deviation(self) -> float:
        """Standard deviation over the splits, 0 for one."""
        return float(np.std(self.splits))


def inception_score(logits: Features, *, split_size: int = SPLIT_SIZE) -> InceptionScore:
    """exp(mean KL(p(y|x) || p(y))) of consecutive splits, averaged, in fp64. logits: (N, classes).

    As ADM's evaluator: logits without bias, 1,008 classes, the last split may be smaller and counts
    as much as the others. A probability of 0 adds 0, where ADM's value is NaN.
    """
    rows = rows_of(logits, "logits")
    splits = [
        _score(torch.from_numpy(np.array(rows[start : start + split_size], np.float64)))
        for start in range(0, len(rows), split_size)
    ]
    return InceptionScore(float(np.mean(splits)), tuple(splits))


def _score(logits: torch.Tensor) -> float:
    """Of one split, (n, classes)."""
    logs = logits.log_softmax(1)
    probabilities = logs.exp()
    mean = probabilities.mean(0)
    divergence = torch.where(probabilities > 0, probabilities * (logs - mean.log()), 0).sum(1)
    return divergence.mean().exp().item()


def _of(samples: FeatureSet, reference: FeatureSet) -> dict[str, float | None]:
    del reference  # the score knows none
    return {"inception_score": inception_score(samples.rows[LOGITS]).value}


IS = Metric(LOGITS, "rows", None, {"inception_score": "Inception Score"}, _of)
