"""Distances of samples' classes to the same classes of real images, where both are labelled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sit_vit5 import rng
from sit_vit5.errors import UserError
from sit_vit5.evaluation.feature_pass import Pass
from sit_vit5.evaluation.inputs import Manifest
from sit_vit5.evaluation.real_sets import (
    RealSet,
    check_matching,
    choose_images,
    samples_numbers,
)
from sit_vit5.metrics.class_distance import class_distances
from sit_vit5.metrics.extractors import POOL
from sit_vit5.metrics.metric import Described

PER_CLASS = 50  # real images of a class, as many as a class-balanced set of 50,000 samples has
BEYOND = 3  # units of noise
NOTHING_IN_COMMON = "and the samples share no class by name"


def choose_real(real: RealSet, manifest: Manifest, seed: int) -> RealSet:
    """At most `PER_CLASS` images of each class that the samples have, drawn at random."""
    labels = samples_numbers(real, manifest.class_names)
    order = rng.generator(seed, "real images of classes").permutation(len(labels))
    drawn = labels[order]
    chosen = [order[drawn == label][:PER_CLASS] for label in np.unique(manifest.labels).tolist()]
    numbers = np.sort(np.concatenate(chosen))
    if not len(numbers):
        raise UserError(f"{real.images.name} {NOTHING_IN_COMMON}; name classes alike")
    matching = check_matching(real, manifest)
    images = choose_images(real.images, numbers)
    return RealSet(images, real.labels[numbers], real.class_names, matching)


def describe_real(real: RealSet, features: Pass) -> Described:
    """Features of the chosen images, in one pass; on the main process alone."""
    return features.describe(
        real.images, rows=[POOL], statistics=(), identity=None, title="real images of classes"
    )


def obstacle(manifest: Manifest | None, count: int) -> str | None:
    """Why samples have no classes to compare, None if they do. count: of samples."""
    if manifest is None or len(manifest.labels) != count:
        return "the samples' labels are not known: they stand in the sampler's manifest"
    if len(manifest.class_names) == 1 or len(set(manifest.labels)) < 2:
        return "the samples are of one class"
    return None


def compare_classes(
    samples: Described, manifest: Manifest, real: RealSet | None, described: Described
) -> dict:
    """Columns of one number per class, as JSON values, or why there are none (`left_out`)."""
    if real is None:
        return {"left_out": "the reference has no labelled images; give such by --classes DATA"}
    if POOL not in samples.rows or POOL not in described.rows:
        return {"left_out": "no features of single images were needed; add kid to --metrics"}
    found = class_distances(
        samples=samples.rows[POOL],
        sample_labels=np.array(manifest.labels),
        reference=described.rows[POOL],
        reference_labels=samples_numbers(real, manifest.class_names),
    )
    if not len(found.labels):
        return {"left_out": f"{real.images.name} {NOTHING_IN_COMMON}"}
    return {
        "statistic": "unbiased kernel distance within the class",
        "reference": real.images.name,
        "labels": found.labels.tolist(),
        "samples": found.samples.tolist(),
        "real": found.reference.tolist(),
        "distances": _rounded(found.distances),
        "noise": _rounded(found.noise),
        "scores": _rounded(found.scores),
        "beyond_noise": int((found.scores > BEYOND).sum()),
    }


def _rounded(values: np.ndarray | Sequence[float]) -> list[float]:
    """Six figures: more are noise, and a thousand classes fill a file."""
    return [float(f"{value:.6g}") for value in values]
