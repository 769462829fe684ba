"""Distances per class: unbiased, with the right noise, and they find what is planted."""

from __future__ import annotations

import numpy as np
import pytest

from sit_vit5.metrics import class_distances, kernel_distance
from sit_vit5.metrics.class_distance import MOST
from sit_vit5.utils.errors import UserError

WIDTH = 24


def normal(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.standard_normal((count, WIDTH)) * 0.5 + 0.4


def compare(samples, sample_labels, reference, reference_labels):
    return class_distances(
        samples=samples, sample_labels=sample_labels,
        reference=reference, reference_labels=reference_labels,
    )  # fmt: skip


def test_equal_distributions_are_at_0_and_vary_by_the_noise():
    rng = np.random.default_rng(0)
    here, there = np.repeat(np.arange(600), 30), np.repeat(np.arange(600), 9)
    found = compare(normal(rng, len(here)), here, normal(rng, len(there)), there)
    assert found.labels.tolist() == list(range(600))
    assert abs(found.distances.mean()) < 3 * found.distances.std() / np.sqrt(600)
    assert found.distances.std() == pytest.approx(found.noise.mean(), rel=0.1)
    assert np.mean(found.scores > 3) < 0.02
    # The distance with its diagonal in would be above 0 in every class.
    assert (found.distances < 0).mean() > 0.4


def test_a_shifted_a_collapsed_and_a_swapped_class_are_the_worst():
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(40), 50)
    samples, reference = normal(rng, 2000), normal(rng, 2000)
    samples[labels == 7] += 0.3
    mean = samples[labels == 11].mean(0)
    samples[labels == 11] = mean + 0.05 * (samples[labels == 11] - mean)  # the mean is the same
    reference[labels == 23, : WIDTH // 2] -= 0.8
    found = compare(samples, labels, reference, labels)
    assert set(np.argsort(-found.scores)[:3].tolist()) == {7, 11, 23}
    assert (found.scores[[7, 23]] > 20).all() and found.scores[11] > 3.5
    assert np.delete(found.scores, [7, 11, 23]).max() < 3


def test_a_class_is_kids_kernel_distance_and_those_without_images_are_left_out():
    rng = np.random.default_rng(2)
    samples, reference = normal(rng, 40), normal(rng, 25) + 0.2
    here = np.array([3] * 20 + [5] * 19 + [6])
    there = np.array([3] * 20 + [6] * 4 + [9])
    found = compare(samples, here, reference, there)
    assert (found.labels.tolist(), found.samples.tolist()) == ([3], [20])
    expected = kernel_distance(samples=samples[:20], reference=reference[:20], subsets=1)
    assert found.distances[0] == pytest.approx(expected.value, rel=1e-9)
    assert not len(compare(samples, here, reference, there + 100).labels)
    with pytest.raises(UserError, match="another extractor"):
        compare(samples, here, reference[:, 1:], there)


def test_a_class_of_many_images_takes_a_bounded_number_of_them():
    labels = np.zeros(MOST + 50, np.int64)
    rows = normal(np.random.default_rng(3), len(labels))
    found = compare(rows, labels, rows[:20], labels[:20])
    assert (found.samples[0], found.reference[0]) == (MOST, 20)
