"""Random numbers are functions of their key."""

from __future__ import annotations

import numpy as np

from sit_vit5.utils import rng


def test_normal_depends_on_the_key_and_on_nothing_else():
    whole = rng.normal(3, "noise", (2, 5), step=7, indices=range(8))
    np.random.seed(0)
    part = rng.normal(3, "noise", (2, 5), step=7, indices=[6, 2])
    assert (part == whole[[6, 2]]).all()


def test_normal_differs_for_every_part_of_the_key():
    base = dict(step=1, indices=[1])
    first = rng.normal(0, "noise", (4,), **base)
    others = [
        rng.normal(1, "noise", (4,), **base),
        rng.normal(0, "sample", (4,), **base),
        rng.normal(0, "noise", (4,), step=2, indices=[1]),
        rng.normal(0, "noise", (4,), step=1, indices=[2]),
    ]
    assert all((first != other).all() for other in others)


def test_streams_of_neighbouring_indices_do_not_overlap():
    numbers = rng.normal(0, "noise", (5000,), indices=range(4)).ravel()
    assert len(np.unique(numbers)) > 0.99 * len(numbers)
    assert len({tuple(numbers[i : i + 3]) for i in range(len(numbers) - 2)}) == len(numbers) - 2


def test_normal_has_zero_mean_and_unit_variance():
    numbers = rng.normal(0, "noise", (1000,), indices=range(100)).astype(np.float64)
    assert abs(numbers.mean()) < 4 / 100_000**0.5
    assert abs(numbers.var() - 1) < 4 * (2 / 100_000) ** 0.5


def test_streams_stay_the_same_over_versions():
    # Pinned: a numpy that changes these breaks the resumption of runs and seeds of sample sets.
    values = rng.normal(0, "sample", (3,), indices=[0])[0]
    np.testing.assert_allclose(values, PINNED, rtol=0, atol=1e-7)


PINNED = [0.092444852, 1.268685699, -0.999956429]
