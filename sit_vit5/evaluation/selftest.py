"""Is this installation right? The reference against itself, where every answer is known (E18)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sit_vit5.errors import UserError
from sit_vit5.metrics.extractors import Extractor
from sit_vit5.metrics.metric import Described, Metric

# Of features of one image alone and among others, as a part of the largest: rounding in fp32.
BATCH_TOLERANCE = 1e-4
# Result -> what a set against itself must give, and how near. A kernel distance that knows no
# image twice is slightly below 0; an Inception Score has no known value.
EXPECTED = {
    "frechet_distance": (0.0, 1e-6),
    "spatial_frechet_distance": (0.0, 1e-6),
    "precision": (1.0, 0.0),
    "recall": (1.0, 0.0),
}
SIDE = 32


def self_test_of(
    reference: Described, metrics: Mapping[str, Metric], extractor: Extractor
) -> dict[str, float]:
    """The errors found, by result; a UserError if one is too large."""
    errors = {"features of an image alone and among others": _batch_error(extractor)}
    limits = dict.fromkeys(errors, BATCH_TOLERANCE)
    for metric in metrics.values():
        if not EXPECTED.keys() & metric.names or not reference.has(metric.samples, metric.output):
            continue
        found = metric.function(reference, reference)
        for key in (key for key in found if key in EXPECTED):
            value, tolerance = EXPECTED[key]
            scale = _scale(reference, metric) if metric.reference == "statistics" else 1.0
            errors[key], limits[key] = abs(found[key] - value), tolerance * scale
    wrong = [f"{what}: error {errors[what]:.3g}" for what in errors if errors[what] > limits[what]]
    if wrong:
        raise UserError(
            f"self-test failed ({'; '.join(wrong)}); the installation's linear algebra or network "
            "is wrong, try another machine or reinstall numpy, scipy and torch"
        )
    return errors


def _scale(reference: Described, metric: Metric) -> float:
    """The size of a distance that rounding is a part of: the total variance, 1 at least."""
    return max(1.0, float(np.trace(reference.statistics[metric.output].covariance)))


def _batch_error(extractor: Extractor) -> float:
    """Largest relative difference between an image's features alone and in a batch of three."""
    images = np.random.Generator(np.random.Philox(key=3)).integers(
        0, 256, (3, SIDE, SIDE, 3), dtype=np.uint8
    )
    together, alone = extractor(images), extractor(images[1:2])
    return max(
        float(np.abs(together[output][1] - alone[output][0]).max() / np.abs(together[output]).max())
        for output in together
    )
