"""Nearest training images of samples: which are found, whatever the kind of data and processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sit_vit5.config import MetricsConfig, RealDataConfig
from sit_vit5.data.array_sources import Digits
from sit_vit5.data.transforms import center_crop
from sit_vit5.evaluation import neighbours as module
from sit_vit5.evaluation.evaluate import evaluate
from sit_vit5.evaluation.report import report
from sit_vit5.utils.errors import UserError

TRAIN, HELD_OUT = Digits("train").images, Digits("held-out").images
LATE = range(200, 206)  # of the samples: copies of training images 1000 ..


def found(folder: Path, images: np.ndarray, training: str = "digits:train", **options) -> dict:
    np.savez(folder / "s.npz", images)
    given = MetricsConfig(
        str(folder / "s.npz"), "digits:held-out", features="pixels", metrics=("fid",),
        neighbours=training, **options,
    )  # fmt: skip
    return evaluate(given)


def test_real_images_that_were_not_trained_on_are_no_finding(tmp_path):
    result = found(tmp_path, HELD_OUT)
    near = result["neighbours"]
    assert near["copies"] == 0 and near["closer"] < near["limit"] < 0.03
    assert near["median"] == pytest.approx(near["real_median"], rel=0.05)
    assert not [said for said in result["warnings"] if "training image" in said]
    assert "samples nearer than 1% of real images" in report(result)


def test_planted_copies_are_found_exact_and_changed(tmp_path):
    images = HELD_OUT.copy()
    images[LATE] = TRAIN[1000:1006]
    images[300:330] = np.maximum(TRAIN[500:530], 8)  # memorised, but not to the pixel
    result = found(tmp_path, images)
    near = result["neighbours"]
    assert (near["copies"], near["copied"]) == (6, list(LATE))
    said = " ".join(result["warnings"])
    assert "samples that are training images, pixel by pixel: 6, such as 200" in said
    assert 0.1 <= near["closer"] < 0.12  # 36 of 360, and those that real images would show
    assert f"{near['closer']:.1%} of samples are nearer to a training image" in said
    pairs = {pair["sample"]: pair["nearest"][0] for pair in near["closest"]}
    assert pairs == {number: number + 800 for number in LATE}


def test_neighbours_are_those_of_all_distances(tmp_path):
    near = found(tmp_path, HELD_OUT[:30])["neighbours"]
    flat, train = HELD_OUT[:30].reshape(30, -1) / 255, TRAIN.reshape(len(TRAIN), -1) / 255
    distances = np.linalg.norm(flat[:, None] - train, axis=2)
    for pair in near["random"] + near["closest"]:
        expected = np.sort(distances[pair["sample"]])[:4]
        np.testing.assert_allclose(pair["distances"], expected, rtol=1e-5)
        shown = distances[pair["sample"], pair["nearest"]]
        np.testing.assert_allclose(shown, expected, rtol=1e-5)


def test_the_choice_follows_the_seed_and_the_batch_size_changes_nothing(tmp_path):
    first = found(tmp_path, HELD_OUT, batch_size=64)["neighbours"]
    large = found(tmp_path, HELD_OUT, batch_size=500)["neighbours"]
    assert [large[key] for key in ("random", "closest")] == [first["random"], first["closest"]]
    assert large["median"] == pytest.approx(first["median"], rel=1e-9)
    other = found(tmp_path, HELD_OUT, seed=1)["neighbours"]
    assert [p["sample"] for p in other["random"]] != [p["sample"] for p in first["random"]]


def test_training_images_are_read_as_training_reads_them(tmp_path, monkeypatch):
    """A folder of larger pictures goes through the crop, of which the samples are copies."""
    monkeypatch.setattr(module, "MOST_QUERIES", 5)
    folder = tmp_path / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(12):
        pixels = rng.integers(0, 256, (16, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    crops = np.stack([center_crop(Image.open(f), 8) for f in sorted(folder.iterdir())[:5]])
    np.savez(tmp_path / "s.npz", crops)
    result = evaluate(
        MetricsConfig(
            str(tmp_path / "s.npz"), str(tmp_path / "s.npz"), features="pixels", metrics=("fid",),
            neighbours=str(folder), real=RealDataConfig(workers=0),
        )
    )  # fmt: skip
    near = result["neighbours"]
    assert (near["copies"], near["count"], near["training"]) == (5, 12, str(folder))
    assert sorted(pair["nearest"][0] for pair in near["closest"]) == list(range(5))


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ("few.npy", "few.npy holds 4 images; give 5 or more"),
        ("small.npy", "has images of .4, 4., the samples .8, 8. .height, width"),
        ("statistics.npz", "holds statistics only, no arr_0; give the images"),
        ("nothing", "nothing does not exist"),
    ],
)
def test_training_data_of_no_use_is_refused(tmp_path, training, message):
    np.save(tmp_path / "few.npy", TRAIN[:4])
    np.save(tmp_path / "small.npy", TRAIN[:9, :4, :4])
    np.savez(tmp_path / "statistics.npz", mu=np.zeros(64), sigma=np.eye(64))
    with pytest.raises(UserError, match=message):
        found(tmp_path, HELD_OUT[:20], str(tmp_path / training))


def test_options_of_the_loader_are_refused_where_nothing_is_loaded(tmp_path):
    with pytest.raises(UserError, match="options --real. have no use"):
        found(tmp_path, HELD_OUT[:20], real=RealDataConfig(split="held-out"))
