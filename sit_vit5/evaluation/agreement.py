"""Do samples show the classes that were asked for? Of built-in labelled sets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sit_vit5.data.digits import Digits
from sit_vit5.errors import UserError
from sit_vit5.evaluation.inputs import Manifest, check_same_size
from sit_vit5.metrics.agreement import class_agreement
from sit_vit5.metrics.image_sets import ImageSet, array_set, with_channels

BATCH = 1024


def digits_agreement(samples: ImageSet, manifest: Manifest) -> dict:
    """The share of samples that a classifier of real digits gives the asked class."""
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
    """Before the long part: is there a classifier, and is it one of such images and classes?"""
    if agreement != "digits":
        raise UserError(f"agreement {agreement!r} is not a labelled built-in set: digits")
    digits = Digits("held-out")
    check_same_size(array_set("digits", digits.images), samples)
    if not samples.is_grey():
        raise UserError(f"{samples.name} is in colour (3 channels), the digits are grey")
    if tuple(class_names) != digits.class_names:
        raise UserError(f"the samples' classes {list(class_names[:12])} are not the digits")


def check_labels(agreement: str, samples: ImageSet, manifest: Manifest | None) -> None:
    """Before the long part: are there labels, and a classifier that knows them?"""
    if not manifest or len(manifest.labels) != samples.count:
        raise UserError(
            f"agreement needs the asked labels of {samples.name}: the manifest beside it is "
            "missing or holds another number of labels"
        )
    check_agreement(agreement, samples, manifest.class_names)
    if max(manifest.labels) >= len(manifest.class_names):
        raise UserError(f"the manifest beside {samples.name} has a label without a class name")
