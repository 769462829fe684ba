"""Nearest neighbours in a stream, and what their distances say of copies."""

from __future__ import annotations

import numpy as np
import pytest

from sit_vit5.metrics import Nearest, closeness

RNG = np.random.default_rng(0)
STREAM = RNG.standard_normal((90, 5)) + 1000  # far from the origin, where squares cancel
QUERIES = RNG.standard_normal((7, 5)) + 1000
DISTANCES = np.linalg.norm(QUERIES[:, None] - STREAM, axis=2)


def nearest(count: int = 3, own=(-1,) * 7, parts=((0, 40), (40, 41), (41, 90))) -> Nearest:
    found = Nearest(QUERIES, count, np.array(own))
    for start, stop in parts:
        found.add(STREAM[start:stop], start)
    return found


def test_the_nearest_are_those_of_a_whole_matrix_of_distances():
    found = nearest()
    np.testing.assert_array_equal(found.numbers.numpy(), np.argsort(DISTANCES)[:, :3])
    np.testing.assert_allclose(found.distances, np.sort(DISTANCES)[:, :3], rtol=1e-9)


def test_parts_of_the_stream_are_merged():
    first, second = nearest(parts=[(0, 40)]), nearest(parts=[(40, 90)])
    first.merge(second.squares, second.numbers)
    np.testing.assert_array_equal(first.numbers.numpy(), nearest().numbers.numpy())


def test_an_image_of_the_stream_is_no_neighbour_of_itself():
    first = np.argsort(DISTANCES)[:, 0]
    found = nearest(own=first)
    np.testing.assert_array_equal(found.numbers.numpy()[:, 0], np.argsort(DISTANCES)[:, 1])


def test_a_stream_shorter_than_k_leaves_infinite_distances():
    found = nearest(parts=[(0, 2)])
    assert np.isfinite(found.distances[:, :2]).all() and np.isinf(found.distances[:, 2]).all()


def test_samples_like_real_images_are_within_the_limit_and_copies_are_beyond_it():
    rng = np.random.default_rng(1)
    real, samples = rng.gamma(9, size=1000), rng.gamma(9, size=1000)
    found = closeness(samples, real)
    assert found.threshold == pytest.approx(np.percentile(real, 1))
    assert found.closer == pytest.approx(0.01, abs=0.01) and found.closer < found.limit
    assert found.median == pytest.approx(found.real_median, rel=0.05)
    samples[:40] = 0.01  # one in 25 is a copy
    assert closeness(samples, real).closer > found.limit
    # 3 standard deviations of two shares of 1% of 1,000: 0.01 + 3 sqrt(0.0099 x 2 / 1000)
    assert found.limit == pytest.approx(0.02335, abs=1e-5)


def test_few_real_images_cannot_tell_that_a_sample_is_nearer_than_all_of_them():
    rng = np.random.default_rng(2)
    drawn = [closeness(rng.gamma(9, size=30), rng.gamma(9, size=15)) for _ in range(400)]
    # Nearer than the nearest of 15: one in 16, not one in 100.
    assert np.mean([found.closer for found in drawn]) == pytest.approx(1 / 16, abs=0.02)
    assert np.mean([found.closer > found.limit for found in drawn]) < 0.03
