"""Inception Score, precision, recall, kernel distance: closed forms, direction, torch-fidelity."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from sit_vit5.metrics import (
    METRICS,
    FeatureSet,
    Statistics,
    inception_score,
    kernel_distance,
    kid,
    precision_recall,
)
from sit_vit5.metrics.features import LOGITS, POOL, SPATIAL
from sit_vit5.utils.errors import UserError

# The name in the package is the function's.
module = sys.modules["sit_vit5.metrics.precision_recall"]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_inception_score_is_the_number_of_classes_that_are_sure_and_equally_frequent():
    sure = np.where(np.eye(6)[np.arange(60) % 6], 100.0, 0.0)
    assert inception_score(sure).value == pytest.approx(6, rel=1e-12)
    assert inception_score(np.zeros((60, 6))).value == pytest.approx(1, rel=1e-12)
    one_class = np.where(np.eye(6)[np.zeros(60, int)], 100.0, 0.0)
    assert inception_score(one_class).value == pytest.approx(1, rel=1e-12)
    certain = np.where(np.eye(6)[np.arange(60) % 6], 0.0, -1e4)  # probabilities of exactly 0
    assert inception_score(certain).value == pytest.approx(6, rel=1e-12)


def test_inception_score_averages_consecutive_splits_the_last_of_which_may_be_smaller():
    logits = rng().standard_normal((25, 4))
    found = inception_score(torch.from_numpy(logits), split_size=10)
    alone = [inception_score(logits[part]).value for part in np.split(np.arange(25), [10, 20])]
    np.testing.assert_allclose(found.splits, alone, rtol=1e-12)
    assert found.value == pytest.approx(np.mean(alone)) and found.value != pytest.approx(
        inception_score(logits).value
    )


def test_inception_score_is_torch_fidelitys_for_equal_splits():
    from torch_fidelity.metric_isc import isc_features_to_metric

    logits = 3 * torch.randn(120, 50, generator=torch.Generator().manual_seed(0))
    theirs = isc_features_to_metric(logits, splits=4, shuffle=False)
    ours = inception_score(logits, split_size=30)
    assert ours.value == pytest.approx(theirs["inception_score_mean"], rel=1e-12)
    assert ours.deviation == pytest.approx(theirs["inception_score_std"], rel=1e-9)


def by_hand(samples: np.ndarray, reference: np.ndarray, k: int) -> tuple[float, float]:
    def distances(a, b):
        return np.square(a[:, None].astype(float) - b[None]).sum(2)

    def share(of, manifold):
        radii = np.sort(distances(manifold, manifold), axis=1)[:, k]
        return (distances(of, manifold) <= radii).any(1).mean()

    return share(samples, reference), share(reference, samples)


@pytest.mark.parametrize("block", [5, 8, 4096])
def test_precision_and_recall_are_those_of_plain_distances_whatever_the_block(monkeypatch, block):
    samples = rng(1).standard_normal((37, 3)).astype(np.float32) + 1000.25  # far from the origin
    reference = rng(2).standard_normal((23, 3)).astype(np.float32) * 1.5 + 1000.25
    monkeypatch.setattr(module, "BLOCK", block)
    largest = []
    squares = module._squares

    def record(*arguments):
        largest.append(squares(*arguments).numel())
        return squares(*arguments)

    monkeypatch.setattr(module, "_squares", record)
    for k in (1, 3):
        found = precision_recall(samples=samples, reference=reference, neighbours=k)
        assert (found.precision, found.recall) == by_hand(samples, reference, k)
    assert max(largest) <= block**2  # never the whole matrix


def test_collapsed_samples_are_precise_and_recall_little():
    reference = rng(0).standard_normal((400, 8))
    collapsed = 0.01 * rng(1).standard_normal((300, 8))  # one mode, in the middle of the real ones
    found = precision_recall(samples=collapsed, reference=reference)
    assert found.precision > 0.99 and found.recall < 0.01
    scattered = precision_recall(samples=5 * rng(2).standard_normal((300, 8)), reference=reference)
    assert scattered.precision < 0.3 and scattered.recall > 0.9


def test_a_set_and_its_copies_are_within_each_other():
    rows = rng(0).standard_normal((50, 16)).astype(np.float32) * 100
    found = precision_recall(samples=rows, reference=rows[::-1])
    assert (found.precision, found.recall) == (1, 1)
    same = np.repeat(rows[:5], 8, axis=0)  # radii of 0: only equal points are within
    found = precision_recall(samples=same, reference=same[::-1])
    assert (found.precision, found.recall) == (1, 1)
    found = precision_recall(samples=same + 1e-2, reference=same)
    assert (found.precision, found.recall) == (0, 0)


def test_one_image_far_off_changes_precision_and_recall_of_no_other():
    samples, reference = rng(1).standard_normal((60, 8)), 0.3 + rng(2).standard_normal((50, 8))
    samples[0] = 1e7
    found = precision_recall(samples=samples, reference=reference)
    assert (found.precision, found.recall) == by_hand(samples, reference, 3)


def test_the_sets_cannot_be_swapped_or_too_small():
    rows = rng().standard_normal((9, 4))
    with pytest.raises(TypeError):
        precision_recall(rows, rows)
    with pytest.raises(TypeError):
        kernel_distance(rows, rows)
    with pytest.raises(UserError, match="more than 3 images of each set; found 3 samples"):
        precision_recall(samples=rows[:3], reference=rows)
    with pytest.raises(UserError, match="needs 2 images of each set, found 1"):
        kernel_distance(samples=rows, reference=rows[:1])
    with pytest.raises(UserError, match="samples have 4 features, the reference 3"):
        kernel_distance(samples=rows, reference=rows[:, :3])


def test_kernel_distance_is_the_unbiased_estimate_of_plain_sums():
    x, y = rng(1).standard_normal((5, 3)), rng(2).standard_normal((4, 3))

    def kernel(a, b):
        return (a @ b / 3 + 1) ** 3

    expected = sum(kernel(a, b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j) / 20
    expected += sum(kernel(a, b) for i, a in enumerate(y) for j, b in enumerate(y) if i != j) / 12
    expected -= 2 * sum(kernel(a, b) for a in x for b in y) / 20
    # Subsets of all of y and of 4 of the 5 rows of x: their mean is the estimate of all.
    found = kernel_distance(samples=x, reference=y, subsets=4000)
    assert found.value == pytest.approx(expected, abs=4 * found.deviation / 4000**0.5)


@pytest.mark.parametrize("subsets", [3, 50])  # one by one, and all at once
def test_kernel_distance_is_torch_fidelitys(subsets):
    from torch_fidelity.metric_kid import kid_features_to_metric

    x, y = (torch.randn(n, 32, generator=torch.Generator().manual_seed(n)) for n in (90, 70))
    assert (len(list(kid._groups([(range(20), range(20))] * subsets, 90, 70))) > 1) == (
        subsets == 3
    )
    theirs = kid_features_to_metric(
        x, y + 0.2, kid_subsets=subsets, kid_subset_size=20, verbose=False
    )
    ours = kernel_distance(samples=x, reference=y + 0.2, subsets=subsets, subset_size=20)
    assert ours.value == pytest.approx(theirs["kernel_inception_distance_mean"], abs=2e-6)
    assert ours.deviation == pytest.approx(theirs["kernel_inception_distance_std"], abs=2e-6)


def test_kernels_are_computed_together_only_where_that_is_less_work():
    subsets = [(range(1000), range(1000))] * 100
    assert len(list(kid._groups(subsets, 10_000, 10_000))) == 1
    assert len(list(kid._groups(subsets, 50_000, 10_000))) == 100  # ten times as fast
    assert len(list(kid._groups(subsets, 10_000, 50_000))) == 100


def test_the_standard_error_of_a_kernel_distance_is_its_spread_between_sets():
    found = [
        kernel_distance(
            samples=rng(seed).standard_normal((100, 4)),
            reference=rng(1000 + seed).standard_normal((100, 4)) + 0.3,
            subsets=60,
            subset_size=25,
        )
        for seed in range(80)
    ]
    spread = np.std([each.value for each in found])
    assert np.mean([each.standard_error for each in found]) == pytest.approx(spread, rel=0.3)
    rows = rng().standard_normal((10, 4))  # one subset only, of everything
    assert kernel_distance(samples=rows, reference=rows).standard_error is None


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_better_for_samples_like_the_reference(name):
    metric = METRICS[name]

    def described(seed: int, shift: float) -> FeatureSet:
        rows = {
            output: rng(seed).standard_normal((60, 12)) + shift
            for output in (POOL, SPATIAL, LOGITS)
        }
        return FeatureSet(rows, {output: Statistics.of(found) for output, found in rows.items()})

    reference = described(0, 0.0)
    near, far = (metric.function(described(1, shift), reference) for shift in (0.01, 4.0))
    assert metric.names.keys() <= near.keys() and near.keys() == far.keys()
    for key in metric.names:
        if metric.reference is None:
            assert near[key] >= 1
        elif key in ("precision", "recall"):
            assert near[key] > far[key]
        else:
            assert near[key] < far[key]
