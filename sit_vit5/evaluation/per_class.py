"""Results per class: agreement of samples with their labels, distances of classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sit_vit5.data.array_sources import Digits
from sit_vit5.evaluation.features import Pass
from sit_vit5.evaluation.inputs import Manifest, check_same_size
from sit_vit5.evaluation.real_sets import RealSet, check_matching, choose_images, samples_numbers
from sit_vit5.metrics.class_distance import class_agreement, class_distances
from sit_vit5.metrics.features import POOL
from sit_vit5.metrics.image_sets import ImageSet, array_set, with_channels
from sit_vit5.metrics.metric import FeatureSet
from sit_vit5.utils import rng
from sit_vit5.utils.errors import UserError

BATCH = 1024


def digits_agreement(samples: ImageSet, manifest: Manifest) -> dict:
    """The share of samples that a classifier of real digits assigns to their label."""
    train, held_out = Digits("train"), Digits("held-out")
    batches = (with_channels(batch, 1, name=samples.name) for batch in samples.batches(BATCH))
    images = np.concatenate(list(batches))
    agreement = class_agreement(
        train=(train.images, train.labels),
        held_out=(held_out.images, held_out.labels),
        samples=(images, np.array(manifest.labels)),
    )
    return {
        "classifier": "support vectors on digits:train",
        "samples": agreement.samples,
        "held_out": agreement.held_out,
        "per_class": list(agreement.per_class),
    }


def check_agreement(agreement: str, samples: ImageSet, class_names: Sequence[str]) -> None:
    """Check early that a classifier exists for such images and classes."""
    if agreement != "digits":
        raise UserError(f"agreement {agreement!r} is not a labelled built-in set: digits")
    digits = Digits("held-out")
    check_same_size(array_set("digits", digits.images), samples)
    if not samples.is_grey():
        raise UserError(f"{samples.name} is in colour (3 channels), the digits are grey")
    if tuple(class_names) != digits.class_names:
        raise UserError(f"the samples' classes {list(class_names[:12])} are not the digits")


def check_labels(agreement: str, samples: ImageSet, manifest: Manifest | None) -> None:
    """Check early that labels exist, and a classifier that knows them."""
    if not manifest or len(manifest.labels) != samples.count:
        raise UserError(
            f"agreement needs the asked labels of {samples.name}: the manifest beside it is "
            "missing or holds another number of labels"
        )
    check_agreement(agreement, samples, manifest.class_names)
    if max(manifest.labels) >= len(manifest.class_names):
        raise UserError(f"the manifest beside {samples.name} has a label without a class name")


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


def describe_real(real: RealSet, features: Pass) -> FeatureSet:
    """Features of the chosen images, in one pass; on the main process only."""
    return features.describe(
        real.images, rows=[POOL], statistics=(), identity=None, title="real images of classes"
    )


def obstacle(manifest: Manifest | None, count: int) -> str | None:
    """Reason why samples have no classes to compare; None if they have. count: of samples."""
    if manifest is None or len(manifest.labels) != count:
        return "the samples' labels are not known: they stand in the sampler's manifest"
    if len(manifest.class_names) == 1 or len(set(manifest.labels)) < 2:
        return "the samples are of one class"
    return None


def compare_classes(
    samples: FeatureSet, manifest: Manifest, real: RealSet | None, described: FeatureSet
) -> dict:
    """Columns of one number per class, as JSON values, or the reason for none (`left_out`)."""
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
    """Round to six digits: more are noise, and a thousand classes fill a file."""
    return [float(f"{value:.6g}") for value in values]
