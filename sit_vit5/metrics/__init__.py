"""Distances between sets of images. Knows nothing of models and sampling: any npz will do."""

from sit_vit5.metrics.frechet import frechet_distance
from sit_vit5.metrics.statistics import Statistics

__all__ = ["Statistics", "frechet_distance"]
