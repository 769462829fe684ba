"""Statistics and Frechet distance against closed forms and scipy; Inception on random weights."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from sit_vit5.errors import UserError
from sit_vit5.metrics import Statistics, frechet_distance
from sit_vit5.metrics.extractors import build_extractor, find_inception_weights
from sit_vit5.metrics.frechet import self_test
from sit_vit5.metrics.image_sets import npz_set


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
    # Rank 150 in 2,048 dimensions, where sqrtm breaks (E1). In a common basis it is a closed form.
    basis, _ = np.linalg.qr(rng().standard_normal((2048, 150)))
    a, b = rng(1).random(150), rng(2).random(150)
    expected = np.square(np.sqrt(a) - np.sqrt(b)).sum()
    mean = np.zeros(2048)
    found = frechet_distance(mean, (basis * a) @ basis.T, mean, (basis * b) @ basis.T)
    assert found == pytest.approx(expected, rel=1e-9)


def test_self_test_passes_and_notices_broken_linear_algebra(monkeypatch):
    self_test()
    svd = np.linalg.svd
    monkeypatch.setattr(np.linalg, "svd", lambda *a, **options: svd(*a, **options) * 1.001)
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


def test_npz_images_are_streamed_in_order_from_stored_and_compressed_files(tmp_path):
    images = rng().integers(0, 256, (23, 4, 5, 3), dtype=np.uint8)
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", arr_0=images, labels=np.arange(23))
        found = npz_set(tmp_path / "a.npz")
        batches = list(found.batches(10))
        assert (found.count, found.shape) == (23, (4, 5, 3))
        assert [len(batch) for batch in batches] == [10, 10, 3]
        assert (np.concatenate(batches) == images).all()


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory) -> Path:
    """Random weights in torch-fidelity's layout, built without its download."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3 as Network

    path = tmp_path_factory.mktemp("inception") / "random.pth"
    torch.manual_seed(0)
    original, Network.load_state_dict = Network.load_state_dict, lambda self, weights: None
    torch.save({}, path)
    try:
        network = Network("random", ["2048"], feature_extractor_weights_path=str(path))
    finally:
        Network.load_state_dict = original
    torch.save(network.state_dict(), path)
    return path


def test_inception_features_equal_the_library_and_ignore_the_batch(inception_file):
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    images = rng().integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    extractor = build_extractor("inception", str(inception_file))
    found = extractor(images)["pool"]
    library = FeatureExtractorInceptionV3(
        "official", ["2048"], feature_extractor_weights_path=str(inception_file)
    ).eval()
    with torch.no_grad():
        (expected,) = library(torch.from_numpy(images).permute(0, 3, 1, 2))
    assert found.shape == (3, 2048)
    np.testing.assert_array_equal(found, expected.numpy())
    np.testing.assert_allclose(extractor(images[1:2])["pool"][0], found[1], rtol=1e-4, atol=1e-5)
    assert len(extractor.identity["weights_sha256"]) == 64


def test_missing_inception_weights_say_how_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"download https://.*--inception-weights FILE"):
        find_inception_weights(None)
    with pytest.raises(UserError, match=r"no.pth do not exist"):
        build_extractor("inception", str(tmp_path / "no.pth"))


def test_a_pickle_in_place_of_inception_weights_is_refused_unexecuted(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    (tmp_path / "bomb.pth").write_bytes(pickle.dumps(Bomb()))
    torch.save({"x": Bomb()}, tmp_path / "bomb2.pth")
    for name in ("bomb.pth", "bomb2.pth"):
        with pytest.raises(UserError, match="is not torch-fidelity's Inception weights"):
            build_extractor("inception", str(tmp_path / name))
    assert not (tmp_path / "executed").exists()


def test_a_foreign_state_dict_is_refused(tmp_path):
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="is not torch-fidelity's Inception weights"):
        build_extractor("inception", str(tmp_path / "other.pth"))
