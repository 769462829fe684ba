"""Reference files of ours and of others, and what is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from sit_vit5.metrics.reference import (
    ADM,
    IMAGES,
    OURS,
    STATISTICS,
    negative_eigenvalue,
    read_reference,
    write_reference,
)
from sit_vit5.metrics.statistics import Statistics
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import file_hash

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
POOL = Statistics.of(RNG.standard_normal((50, 6)))
SPATIAL = Statistics.of(RNG.standard_normal((50, 3)))
MU = {"mu": POOL.mean, "sigma": POOL.covariance}
MU_S = {"mu_s": SPATIAL.mean, "sigma_s": SPATIAL.covariance}
INCEPTION = {"features": "inception", "weights_sha256": "w"}
FACTS = {"count": 50, "image_shape": [4, 4, 3], "extractor": INCEPTION}


def ours(path: Path, **changes) -> Path:
    parts = dict(pool=POOL, spatial=SPATIAL, images=PIXELS, labels=np.arange(5), facts=FACTS)
    write_reference(path, **(parts | changes))
    return path


def test_files_of_others_are_recognised_by_what_they_hold(tmp_path):
    path = tmp_path / "ref.npz"
    for arrays, kind in (
        ({"arr_0": PIXELS, **MU, **MU_S}, ADM),
        ({"arr_0": PIXELS, **MU}, ADM),
        ({key: value.astype(np.float32) for key, value in MU.items()}, STATISTICS),
        ({"arr_0": PIXELS}, IMAGES),
    ):
        np.savez(path, **arrays)
        found = read_reference(path)
        assert found.kind == kind and found.facts == {} and found.sha256 == file_hash(path)
        assert (found.pool is None) == (kind == IMAGES)
        assert (found.spatial is None) == ("mu_s" not in arrays)
        assert found.image_shape == (None if kind == STATISTICS else (4, 4, 3))
        if found.pool is not None:
            np.testing.assert_allclose(found.pool.covariance, POOL.covariance, rtol=1e-6)
            assert found.pool.covariance.dtype == np.float64


def test_a_written_reference_is_read_back_and_the_same_arrays_give_the_same_bytes(tmp_path):
    path = ours(tmp_path / "a.npz")
    found = read_reference(path)
    assert found.kind == OURS and found.facts["extractor"] == INCEPTION and found.count == 50
    np.testing.assert_array_equal(found.pool.mean, POOL.mean)
    np.testing.assert_array_equal(found.spatial.covariance, SPATIAL.covariance)
    assert (found.images.images([4, 0]) == PIXELS[[4, 0]]).all()
    assert found.labels.tolist() == [0, 1, 2, 3, 4]
    assert file_hash(ours(tmp_path / "b.npz")) == found.sha256
    assert not list(tmp_path.glob("*.partial"))
    # Readable by everybody, without pickles.
    with np.load(path) as plain:
        assert {"mu", "sigma", "mu_s", "sigma_s", "arr_0"} < set(plain.files)


def test_labels_are_those_of_the_images_or_none(tmp_path):
    for labels, found in ((np.arange(5), [0, 1, 2, 3, 4]), (np.arange(4), None), (["a"] * 5, None)):
        np.savez(tmp_path / "adm.npz", PIXELS, labels, **MU)  # arr_0 and arr_1
        read = read_reference(tmp_path / "adm.npz").labels
        assert (read if found is None else read.tolist()) == found


def test_another_size_is_refused(tmp_path):
    for path in (ours(tmp_path / "a.npz"), tmp_path / "adm.npz"):
        np.savez(tmp_path / "adm.npz", arr_0=PIXELS, **MU)
        found = read_reference(path)
        found.check_size((4, 4, 3))
        with pytest.raises(UserError, match=r"images of \(4, 4\), the samples \(8, 8\)"):
            found.check_size((8, 8, 3))


def test_statistics_are_for_the_extractor_that_made_them(tmp_path):
    found = read_reference(ours(tmp_path / "a.npz"))
    assert found.has_statistics_of(INCEPTION)
    found.check_extractor(INCEPTION)
    other = {**INCEPTION, "weights_sha256": "other"}
    with pytest.raises(UserError, match="another extractor .weights_sha256 w, here other.; use"):
        found.check_extractor(other)
    np.savez(tmp_path / "plain.npz", **MU)
    plain = read_reference(tmp_path / "plain.npz")
    assert plain.has_statistics_of(other)  # of Inception with weights that nobody recorded
    with pytest.raises(UserError, match="features inception, here pixels"):
        plain.check_extractor({"features": "pixels"})
    np.savez(tmp_path / "images.npz", PIXELS)
    assert not read_reference(tmp_path / "images.npz").has_statistics_of(INCEPTION)


def facts(**changes) -> str:
    return json.dumps({"schema": 1, **FACTS, "class_names": ["a", "b", "c"], **changes})


SKEW = POOL.covariance + np.triu(np.ones((6, 6)), 1)


@pytest.mark.parametrize(
    "arrays, message",
    [
        (
            {"mean": POOL.mean, "cov": POOL.covariance},
            "holds mean, cov; expected arr_0 .*or mu and",
        ),
        ({"mu": POOL.mean}, "holds mu; expected arr_0"),
        (MU | {"mu": POOL.mean[:4]}, r"mu \(4,\) and sigma \(6, 6\) do not fit"),
        (MU | {"mu": POOL.mean[None]}, r"mu \(1, 6\) and sigma"),
        (MU | {"sigma": POOL.covariance * np.nan}, "mu and sigma are not all finite"),
        (MU | {"sigma": SKEW}, "sigma is not symmetric"),
        (MU | {"sigma": POOL.covariance.astype(str)}, "mu and sigma are not numbers"),
        (MU | {"mu": np.array([None] * 6)}, "are not numbers: object"),
        (MU | MU_S | {"mu_s": SPATIAL.mean + np.inf}, "mu_s and sigma_s are not all finite"),
        (MU | {"facts": "no json"}, "its facts cannot be read"),
        (MU | {"facts": '{"schema": 9}'}, "schema 9, this version reads 1"),
        (MU | {"facts": '{"schema": 1}'}, "its facts cannot be read: extractor: .*make it again"),
        (MU | {"facts": facts(extractor="x")}, "its facts cannot be read: extractor: "),
        (MU | {"facts": facts(image_shape=[1, 1])}, "its facts cannot be read: image_shape.2: "),
        (MU | {"facts": facts(image_shape=[1, "1", 1])}, "facts cannot be read: image_shape.1: "),
        (MU | {"facts": facts(count="x")}, "its facts cannot be read: count: "),
        (MU | {"facts": facts(count=0)}, "its facts cannot be read: count: "),
        (MU | {"facts": facts(class_names=None)}, "its facts cannot be read: class_names: "),
        (MU | {"facts": facts(class_names=["\ud800"])}, "its facts cannot be read: .*; make it"),
        (MU | {"facts": "[" * 10**5}, "its facts cannot be read: .*make it again"),
        (MU | {"facts": np.arange(3)}, "its facts cannot be read: "),
        (
            MU | {"facts": facts(), "arr_0": PIXELS, "labels": np.arange(5)},
            "labels holds 4, the number of no class of its 3 classes; make it again",
        ),
        (MU | {"arr_0": PIXELS, "arr_1": np.arange(5) - 1}, "arr_1 holds -1, the number of no cla"),
        (MU | {"arr_0": PIXELS, "labels": np.full(5, 2**63, np.uint64)}, "labels holds 9223372036"),
        (MU | {"sigma": -POOL.covariance}, "sigma has negative variances"),
        ({"mu": POOL.mean[:0], "sigma": POOL.covariance[:0, :0]}, "do not fit"),
        (MU | {"arr_0": PIXELS / 255.0}, "expected uint8 images"),
    ],
)
def test_what_is_no_reference_is_refused_in_one_line(tmp_path, arrays, message):
    np.savez(tmp_path / "ref.npz", **arrays)
    with pytest.raises(UserError, match=message) as error:
        read_reference(tmp_path / "ref.npz")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "sound"),
    [
        ([3.0, 1.0, 0.0], True),
        ([3.0, 1.0, -1e-7], True),  # rounding of fp32
        ([3.0, 1.0, -1e-5], False),
        ([3.0, -0.5, -0.5], False),
        ([0.0, 0.0, 0.0], True),
    ],
)
def test_a_matrix_with_negative_eigenvalues_is_no_covariance(tmp_path, values, sound):
    basis, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((3, 3)))
    sigma = (basis * values) @ basis.T
    found = negative_eigenvalue((sigma + sigma.T) / 2)
    assert found == (0 if sound else pytest.approx(values[-1]))


def test_a_reference_that_is_no_covariance_is_refused(tmp_path):
    sigma = np.ones((6, 6)) - 0.5 * np.eye(6)
    np.savez(tmp_path / "ref.npz", mu=POOL.mean, sigma=sigma)
    with pytest.raises(UserError, match="sigma is NOT a covariance: smallest eigenvalue -0.5; the"):
        read_reference(tmp_path / "ref.npz").check_covariances()


def test_a_pickle_is_refused_unexecuted_and_the_alternative_named(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    (tmp_path / "edm.pkl").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError, match=r"is a pickle.*np.savez\('ref.npz', mu=mean, sigma=cov"):
        read_reference(tmp_path / "edm.pkl")
    (tmp_path / "renamed.npz").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError, match="is not an npz file"):
        read_reference(tmp_path / "renamed.npz")
    np.savez(tmp_path / "inside.npz", mu=np.array([Bomb()]), sigma=np.eye(1))
    with pytest.raises(UserError, match="are not numbers: object"):
        read_reference(tmp_path / "inside.npz")
    assert not (tmp_path / "executed").exists()
