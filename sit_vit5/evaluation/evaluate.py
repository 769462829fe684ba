"""The metrics of one set of samples."""

from __future__ import annotations

import math
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sit_vit5 import __version__
from sit_vit5.config import MetricsConfig
from sit_vit5.data.digits import Digits
from sit_vit5.errors import UserError
from sit_vit5.evaluation.inputs import (
    Manifest,
    check_same_size,
    hash_of,
    lossy_note,
    open_image_set,
    read_manifest,
)
from sit_vit5.metrics.agreement import class_agreement
from sit_vit5.metrics.extractors import POOL, Extractor, build_extractor
from sit_vit5.metrics.features import extract_statistics
from sit_vit5.metrics.frechet import frechet_distance, self_test
from sit_vit5.metrics.image_sets import (
    IMAGES_KEY,
    ImageSet,
    array_set,
    npz_array,
    npz_keys,
    npz_set,
)
from sit_vit5.metrics.statistics import Gaussian, Statistics


@dataclass(frozen=True)
class Reference:
    """What samples are compared with: features and statistics, for any number of sample sets."""

    extractor: Extractor
    statistics: Statistics | Gaussian
    sha256: str | None
    notes: list[str]


def open_reference(options: MetricsConfig, samples: ImageSet) -> Reference:
    """The reference that the options name, for sets of images of the samples' size."""
    self_test()
    extractor = build_extractor(options.features, options.inception_weights)
    statistics, notes = reference_statistics(options, extractor, samples)
    return Reference(extractor, statistics, hash_of(options.reference), notes)


def evaluate(options: MetricsConfig, *, reference: Reference | None = None) -> dict:
    """All metrics of one set of samples, as JSON values, with what is needed to trust them.

    reference: the opened one, if it serves several sets.
    """
    samples = open_image_set(options.samples)
    samples_hash = hash_of(options.samples)
    manifest = read_manifest(options.samples, samples_hash)
    if options.agreement:
        _check_labels(options, samples, manifest)
    floor = open_image_set(options.floor) if options.floor else None
    if floor:
        check_same_size(floor, samples)
    reference = reference or open_reference(options, samples)
    compared, extractor = reference.statistics, reference.extractor
    found = _statistics(samples, extractor, options, "samples")
    notes = reference.notes + sample_notes(samples, found, manifest)
    result = {
        "command": shlex.join(sys.argv),
        "samples": options.samples,
        "samples_sha256": samples_hash,
        "count": samples.count,
        "reference": options.reference,
        "reference_sha256": reference.sha256,
        "reference_count": compared.count if isinstance(compared, Statistics) else None,
        "extractor": extractor.identity,
        "frechet_distance": _distance(found, compared),
    }
    if floor:
        floor_statistics = _statistics(floor, extractor, options, "floor")
        result["floor"] = {
            "samples": options.floor,
            "count": floor.count,
            "frechet_distance": _distance(floor_statistics, compared),
        }
    if options.agreement:
        result["agreement"] = digits_agreement(options, samples, manifest)
    facts = manifest.facts if manifest else None
    return result | {"notes": notes, "versions": _versions(), "manifest": facts}


def _versions() -> dict:
    return {
        "sit_vit5": __version__,
        "numpy": np.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def reference_statistics(
    options: MetricsConfig, extractor: Extractor, samples: ImageSet
) -> tuple[Statistics | Gaussian, list[str]]:
    """Stored `mu` and `sigma`, or the statistics of the reference's images; and notes on them."""
    path = Path(options.reference)
    if path.is_file():
        keys = set(npz_keys(path))
        stored = {"mu", "sigma"} <= keys
        if stored and extractor.identity["features"] == "inception":
            if IMAGES_KEY in keys:  # ADM's files hold both; the images tell the size
                check_same_size(npz_set(path), samples)
                return _stored_statistics(path), []
            return _stored_statistics(path), [f"{path} does not tell the size of its images"]
        if IMAGES_KEY not in keys:
            found = "Inception statistics" if stored else ", ".join(sorted(keys)) or "nothing"
            raise UserError(
                f"{path} holds {found}; expected {IMAGES_KEY}"
                + ("; or use --features inception" if stored else ", or mu and sigma")
            )
    reference = open_image_set(options.reference)
    check_same_size(reference, samples)
    statistics = _statistics(reference, extractor, options, "reference")
    return statistics, _few_note("reference images", statistics) + lossy_note(reference)


def sample_notes(samples: ImageSet, found: Statistics, manifest: Manifest | None) -> list[str]:
    """What a reader of the numbers should know of the samples."""
    notes = _few_note("samples", found) + lossy_note(samples)
    if manifest is None:
        notes.append("no manifest beside the samples: the sampler's settings are unknown")
    return notes


def digits_agreement(options: MetricsConfig, samples: ImageSet, manifest: Manifest) -> dict:
    """The share of samples that a classifier of real digits gives the asked class."""
    train, held_out = Digits("train"), Digits("held-out")
    images = np.concatenate(list(samples.batches(options.batch_size)))
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
    """Before the long part: is there a classifier, and is it one of such images and classes?"""
    if agreement != "digits":
        raise UserError(f"agreement {agreement!r} is not a labelled built-in set: digits")
    digits = Digits("held-out")
    check_same_size(array_set("digits", digits.images), samples)
    if tuple(class_names) != digits.class_names:
        raise UserError(f"the samples' classes {list(class_names[:12])} are not the digits")


def _check_labels(options: MetricsConfig, samples: ImageSet, manifest: Manifest | None) -> None:
    """Before the long part: are there labels, and a classifier that knows them?"""
    if not manifest or len(manifest.labels) != samples.count:
        raise UserError(
            f"agreement needs the asked labels of {options.samples}: the manifest beside it is "
            "missing or holds another number of labels"
        )
    check_agreement(options.agreement, samples, manifest.class_names)
    if max(manifest.labels) >= len(manifest.class_names):
        raise UserError(f"the manifest beside {options.samples} has a label without a class name")


def _few_note(what: str, statistics: Statistics) -> list[str]:
    features = len(statistics.mean)
    if statistics.count > features:
        return []
    return [
        f"{statistics.count} {what} for {features} features: the covariance is rank-deficient and "
        "the distance biased upwards; compare equal counts only"
    ]


def _statistics(
    images: ImageSet, extractor: Extractor, options: MetricsConfig, title: str
) -> Statistics:
    return extract_statistics(
        extractor, images.batches(options.batch_size), title=title, total=images.count
    )[POOL]


def _stored_statistics(path: Path) -> Gaussian:
    try:
        mean, covariance = (np.asarray(npz_array(path, key), np.float64) for key in ("mu", "sigma"))
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: mu and sigma are not numbers: {error}") from None
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        raise UserError(f"{path}: mu {mean.shape} and sigma {covariance.shape} do not fit together")
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
        raise UserError(f"{path}: mu or sigma is not finite")
    return Gaussian(mean, covariance)


def _distance(a: Statistics, b: Statistics | Gaussian) -> float:
    if a.mean.shape != b.mean.shape:
        raise UserError(
            f"samples have {len(a.mean)} features, the reference {len(b.mean)}; it was made with "
            "another extractor"
        )
    distance = frechet_distance(a.mean, a.covariance, b.mean, b.covariance)
    if not math.isfinite(distance):
        raise UserError("the distance is not finite; check the reference and the extractor")
    return distance
