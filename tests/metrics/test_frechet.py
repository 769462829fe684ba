"""Statistics, Frechet distance and its uncertainty against closed forms and scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sit_vit5.metrics import (
    Gaussian,
    Statistics,
    bootstrap_frechet_distance,
    extrapolated_frechet_distance,
    frechet_distance,
    frechet_distance_of,
    statistics,
)
from sit_vit5.metrics import fid as frechet
from sit_vit5.metrics.fid import self_test
from sit_vit5.metrics.statistics import rows_of
from sit_vit5.utils.errors import UserError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def spd(size: int, seed: int) -> np.ndarray:
    root = rng(seed).standard_normal((size, 2 * size))
    return root @ root.T / size


def test_distance_of_isotropic_gaussians_is_the_closed_form():
    size, a, b = 12, 2.0, 0.5
    shift = rng().standard_normal(size)
    found = frechet_distance(np.zeros(size), a**2 * np.eye(size), shift, b**2 * np.eye(size))
    assert found == pytest.approx(shift @ shift + size * (a - b) ** 2, rel=1e-12)


def test_distance_of_a_gaussian_to_itself_is_zero_also_without_full_rank():
    thin = rng().standard_normal((5, 40))
    for covariance in (spd(40, 1), np.cov(thin, rowvar=False), np.zeros((40, 40))):
        mean = rng(2).standard_normal(40)
        assert abs(frechet_distance(mean, covariance, mean, covariance)) < 1e-10


@pytest.mark.parametrize("size", [1, 8, 64])
def test_distance_agrees_with_scipy_on_full_rank(size):
    from scipy.linalg import sqrtm

    c1, c2, shift = spd(size, 1), spd(size, 2), rng(3).standard_normal(size)
    expected = shift @ shift + np.trace(c1 + c2 - 2 * np.real(sqrtm(c1 @ c2)))
    found = frechet_distance(np.zeros(size), c1, shift, c2)
    assert found == pytest.approx(expected, rel=1e-8)
    assert frechet_distance(shift, c2, np.zeros(size), c1) == pytest.approx(found, rel=1e-9)


def test_distance_is_right_for_near_singular_inception_sized_covariances():
    # Rank 150 in 2,048 dimensions, where sqrtm breaks. In a common basis it is a closed form.
    basis, _ = np.linalg.qr(rng().standard_normal((2048, 150)))
    a, b = rng(1).random(150), rng(2).random(150)
    expected = np.square(np.sqrt(a) - np.sqrt(b)).sum()
    mean = np.zeros(2048)
    found = frechet_distance(mean, (basis * a) @ basis.T, mean, (basis * b) @ basis.T)
    assert found == pytest.approx(expected, rel=1e-9)


def test_self_test_passes_and_notices_broken_linear_algebra(monkeypatch):
    self_test()
    for library, name in ((np.linalg, "svd"), (torch.linalg, "eigvalsh")):
        right = getattr(library, name)
        with monkeypatch.context() as broken:
            broken.setattr(library, name, lambda *a, right=right, **o: right(*a, **o) * 1.001)
            with pytest.raises(RuntimeError, match="self-test of the Frechet distance failed"):
                self_test()


def test_merged_statistics_equal_those_of_all_rows_at_once():
    rows = 1e4 + rng().standard_normal((101, 7))  # a large mean: sums of squares would cancel
    whole = Statistics.of(rows)
    merged = Statistics.of(rows[:1])
    for start, stop in ((1, 30), (30, 31), (31, 101)):
        merged = merged.merge(Statistics.of(rows[start:stop]))
    assert merged.count == 101
    np.testing.assert_allclose(merged.mean, rows.mean(0), rtol=1e-14)
    np.testing.assert_allclose(whole.covariance, np.cov(rows, rowvar=False), rtol=1e-9)
    np.testing.assert_allclose(merged.covariance, whole.covariance, rtol=1e-9, atol=1e-12)


def test_eigenvalues_and_singular_values_give_the_same_distance(monkeypatch):
    c1, c2, shift = spd(40, 1), spd(40, 2), rng(3).standard_normal(40)
    assert frechet._cross_of_full_rank(c1, c2, 1e-6) is not None
    fast = frechet_distance(np.zeros(40), c1, shift, c2)
    monkeypatch.setattr(frechet, "ROUNDING", 0.0)
    assert frechet._cross_of_full_rank(c1, c2, 0.0) is None
    assert frechet_distance(np.zeros(40), c1, shift, c2) == pytest.approx(fast, rel=1e-12)


def test_distance_takes_arrays_tensors_batches_and_statistics_alike():
    a, b = rng(0).standard_normal((50, 6)), 1 + rng(1).standard_normal((40, 6))
    expected = frechet_distance(
        a.mean(0), np.cov(a, rowvar=False), b.mean(0), np.cov(b, rowvar=False)
    )
    gaussian = Gaussian(b.mean(0), np.cov(b, rowvar=False))
    batches = (torch.from_numpy(a[start : start + 7]) for start in range(0, 50, 7))
    for samples, reference in ((a, b), (torch.from_numpy(a), gaussian), (batches, [b[:1], b[1:]])):
        assert frechet_distance_of(samples, reference) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros((3, 2, 2)), "expected features .N, D., found float64"),
        (np.full((3, 6), np.nan), "features are not finite"),
        ([], "features: no features"),
        (np.zeros((3, 5)), "samples have 5 features, the reference 6"),
    ],
)
def test_features_of_a_wrong_kind_are_refused(samples, message):
    with pytest.raises(UserError, match=message):
        frechet_distance_of(samples, rng().standard_normal((9, 6)))


def test_statistics_of_the_same_rows_are_equal_to_the_bit_however_they_arrive(monkeypatch):
    monkeypatch.setattr(statistics, "BLOCK", 16)
    rows = rng().standard_normal((101, 5)).astype(np.float32)
    whole = Statistics.of(rows)
    for size in (1, 7, 16, 40):
        found = Statistics.of(rows[start : start + size] for start in range(0, 101, size))
        assert found.count == 101
        assert (found.mean == whole.mean).all() and (found.scatter == whole.scatter).all()
    np.testing.assert_allclose(whole.covariance, np.cov(rows, rowvar=False), rtol=1e-6)


def test_a_buffer_that_a_generator_fills_again_is_copied():
    rows, buffer = rng().standard_normal((12, 3)), np.empty((4, 3))

    def batches():
        for start in range(0, 12, 4):
            buffer[:] = rows[start : start + 4]
            yield buffer

    assert (Statistics.of(batches()).scatter == Statistics.of(rows).scatter).all()
    assert (rows_of(batches(), "samples") == rows).all()


def test_extrapolation_removes_the_bias_of_few_samples():
    # Samples of the reference's own Gaussian: the distance at infinite N is 0.
    true = Gaussian(np.zeros(8), np.eye(8))
    found = extrapolated_frechet_distance(
        samples=rng(1).standard_normal((2000, 8)), reference=true, points=5
    )
    assert found.counts == (400, 800, 1200, 1600, 2000)
    assert found.distances[0] > found.distances[-1] > 0.008 and found.slope > 0
    assert abs(found.value) < 0.1 * found.distances[0]


def test_extrapolation_starts_where_the_bias_falls_as_one_over_n():
    # Of 5 samples per feature: from a tenth of them, without full rank, it gives less than 0.
    true = Gaussian(np.zeros(32), np.eye(32))
    found = extrapolated_frechet_distance(
        samples=1.1 * rng(3).standard_normal((320, 32)), reference=true
    )
    assert found.counts[0] == 96 and found.counts[-1] == 320
    assert found.value == pytest.approx(32 * 0.1**2, abs=0.15) and found.distances[-1] > 1


def test_extrapolation_needs_samples():
    with pytest.raises(UserError, match="takes 20 samples or more, found 19"):
        extrapolated_frechet_distance(samples=np.eye(19), reference=np.eye(19))


def test_the_bootstrap_tells_how_a_distance_varies_between_sets_of_samples():
    true = Gaussian(np.zeros(4), np.eye(4))
    sets = 0.5 + rng(2).standard_normal((150, 200, 4))
    spread = np.std([frechet_distance_of(samples, true) for samples in sets])
    found = bootstrap_frechet_distance(samples=sets[0], reference=true, resamples=200)
    assert found.value == frechet_distance_of(sets[0], true)
    assert found.standard_error == pytest.approx(spread, rel=0.25)
    assert found.high - found.low == pytest.approx(2 * 1.96 * found.standard_error)
    again = bootstrap_frechet_distance(samples=sets[0], reference=true, resamples=200)
    assert again == found  # no hidden generator
