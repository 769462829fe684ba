"""Distances between sets of images. Knows nothing of models and sampling: any npz will do.

Features come from an extractor or from elsewhere, as NumPy or torch arrays (N, D) or iterables of
batches of them. `METRICS` names every metric; `Accumulator` computes them in a training loop.
"""

from sit_vit5.metrics.accumulator import Accumulator, describe, extract_features, extract_statistics
from sit_vit5.metrics.class_distance import ClassDistances, class_distances
from sit_vit5.metrics.features import EXTRACTORS, Extractor, build_extractor
from sit_vit5.metrics.fid import frechet_distance, frechet_distance_of
from sit_vit5.metrics.inception_score import inception_score
from sit_vit5.metrics.kid import kernel_distance
from sit_vit5.metrics.metric import FeatureSet, Metric
from sit_vit5.metrics.neighbours import Closeness, Nearest, closeness
from sit_vit5.metrics.precision_recall import precision_recall
from sit_vit5.metrics.registry import METRICS
from sit_vit5.metrics.statistics import Gaussian, Statistics
from sit_vit5.metrics.uncertainty import bootstrap_frechet_distance, extrapolated_frechet_distance

__all__ = [
    "EXTRACTORS",
    "METRICS",
    "Accumulator",
    "ClassDistances",
    "Closeness",
    "Extractor",
    "FeatureSet",
    "Gaussian",
    "Metric",
    "Nearest",
    "Statistics",
    "bootstrap_frechet_distance",
    "build_extractor",
    "class_distances",
    "closeness",
    "describe",
    "extract_features",
    "extract_statistics",
    "extrapolated_frechet_distance",
    "frechet_distance",
    "frechet_distance_of",
    "inception_score",
    "kernel_distance",
    "precision_recall",
]
