"""What a person gave to compare, opened and checked before anything that takes time."""

from __future__ import annotations

from dataclasses import dataclass

from sit_vit5.config import MetricsConfig, RealDataConfig
from sit_vit5.errors import UserError
from sit_vit5.evaluation.agreement import check_labels
from sit_vit5.evaluation.classes import choose_real, obstacle
from sit_vit5.evaluation.feature_pass import MOST_ROWS
from sit_vit5.evaluation.inputs import (
    Manifest,
    check_same_size,
    hash_of,
    open_image_set,
    read_manifest,
)
from sit_vit5.evaluation.real_sets import LoadedSet, RealSet, open_real
from sit_vit5.metrics.image_sets import ImageSet


@dataclass(frozen=True)
class Inputs:
    """What a person gave beside the reference, opened; the real sets where they were asked for."""

    samples: ImageSet
    sha256: str | None
    manifest: Manifest | None
    floor: ImageSet | None
    classes: RealSet | None
    neighbours: RealSet | None


def open_inputs(options: MetricsConfig) -> Inputs:
    """Opens and checks them, before anything that takes time."""
    samples = open_image_set(options.samples)
    sha256 = hash_of(options.samples)
    manifest = read_manifest(options.samples, sha256)
    if options.agreement:
        check_labels(options.agreement, samples, manifest)
    floor = open_image_set(options.floor) if options.floor else None
    if floor:
        check_same_size(floor, samples)
    if options.neighbours and samples.count > MOST_ROWS:
        raise UserError(f"neighbours are of at most {MOST_ROWS:,} samples, found {samples.count:,}")
    classes = None
    if options.classes:
        if reason := obstacle(manifest, samples.count):
            raise UserError(f"classes {options.classes} has no use: {reason}")
        real = open_real(options.classes, options.real, samples, labelled=True)
        classes = choose_real(real, manifest, options.seed)
    neighbours = None
    if options.neighbours:
        neighbours = open_real(options.neighbours, options.real, samples, labelled=False)
    loaded = [isinstance(real.images, LoadedSet) for real in (classes, neighbours) if real]
    if options.real != RealDataConfig() and not any(loaded):
        raise UserError(
            "options --real. have no use: neither classes nor neighbours are a data set that "
            "training's loader reads; drop them"
        )
    return Inputs(samples, sha256, manifest, floor, classes, neighbours)
