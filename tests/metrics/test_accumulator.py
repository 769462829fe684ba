"""The accumulator: any order, any number of processes, every image once."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import torch

from sit_vit5.metrics import (
    METRICS,
    Accumulator,
    FeatureSet,
    build_extractor,
    describe,
    frechet_distance_of,
    precision_recall,
)
from sit_vit5.utils import distributed
from sit_vit5.utils.errors import UserError

EXTRACTOR = build_extractor("pixels")
IMAGES, REAL = np.random.default_rng(0).integers(0, 256, (2, 60, 3, 3, 1), dtype=np.uint8)
POOL_METRICS = [name for name, metric in METRICS.items() if metric.output == "pool"]


def rows(images: np.ndarray) -> np.ndarray:
    return EXTRACTOR(images)["pool"]


def reference() -> FeatureSet:
    return describe({"pool": rows(REAL)}, ["pool"])


def computed(shares: list[list[np.ndarray]], metrics=POOL_METRICS) -> dict:
    """The values of images that several processes make, each in batches."""
    states = []
    for share in shares:
        accumulator = Accumulator(EXTRACTOR, metrics, reference())
        for indices in share:
            accumulator.update(IMAGES[indices], indices)
        states.append(accumulator.state())
    whole = Accumulator(EXTRACTOR, metrics, reference())
    for state in states:
        whole.merge(state)
    return whole.compute()


def cut(order: np.ndarray, *places: int) -> list[np.ndarray]:
    return np.split(order, places)


def test_values_are_the_same_to_the_bit_for_any_number_of_processes():
    order = np.arange(60)
    alone = computed([cut(order, 40)])
    mixed = np.random.default_rng(1).permutation(60)
    for shares in (
        [cut(order[:20], 7), cut(order[20:], 1, 2)],
        [cut(order[0::3], 5), cut(order[1::3]), cut(order[2::3], 19)],
        [cut(mixed[:1]), [], cut(mixed[1:], 30)],
    ):
        assert computed(shares) == alone
    assert alone["frechet_distance"] == frechet_distance_of(rows(IMAGES), rows(REAL))
    found = precision_recall(samples=rows(IMAGES), reference=rows(REAL))
    assert (alone["precision"], alone["recall"]) == (found.precision, found.recall)


def test_a_distance_alone_keeps_statistics_and_no_features():
    order = np.arange(60)
    accumulator = Accumulator(EXTRACTOR, ("fid",), reference())
    accumulator.update(torch.from_numpy(IMAGES), order)
    assert not accumulator.state().rows
    expected = computed([cut(order)])["frechet_distance"]
    for shares in ([cut(order)], [cut(order[30:], 4), cut(order[:30])]):
        found = computed(shares, ("fid",))["frechet_distance"]
        assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    "batches",
    [
        [range(10), range(11, 60)],
        [range(60), range(5, 6)],
        [range(1, 60)],
        [],
    ],
    ids=["a gap", "a repeat", "no first one", "none"],
)
def test_missing_and_repeated_images_are_refused(batches):
    with pytest.raises(UserError, match=r"0 .. N - 1 once each"):
        computed([[np.array(batch) for batch in batches]])


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match="metric kid needs rows of the reference's pool features"):
        Accumulator(EXTRACTOR, ("kid",), FeatureSet(statistics=reference().statistics)).compute()
    with pytest.raises(UserError, match="unknown metric 'fidd'; nearest: fid"):
        Accumulator(EXTRACTOR, ("fidd",))
    accumulator = Accumulator(EXTRACTOR, ("fid",), reference())
    with pytest.raises(UserError, match="expected 3 uint8 images .B, H, W, C., found float32"):
        accumulator.update(np.zeros((3, 4, 4, 3), np.float32), range(3))


def test_the_example_in_the_docstring_runs():
    names = {
        "Accumulator": Accumulator,
        "extractor": EXTRACTOR,
        "images": IMAGES,
        "reference": reference(),
        "gather": distributed.gather,
        "processes": distributed.alone(),
    }
    (example,) = doctest.DocTestFinder(recurse=False).find(Accumulator, globs=names)
    assert doctest.DocTestRunner().run(example).failed == 0 and len(example.examples) == 5
