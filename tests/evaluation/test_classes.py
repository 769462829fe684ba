"""Distances per class in a result: whose labels, which names, and why there are none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sit_vit5.config import MetricsConfig
from sit_vit5.data.digits import Digits
from sit_vit5.errors import UserError
from sit_vit5.evaluation import classes as module
from sit_vit5.evaluation.evaluate import evaluate, examine
from sit_vit5.evaluation.report import report
from sit_vit5.metrics.reference_file import write_reference
from sit_vit5.metrics.statistics import Statistics

TRAIN, HELD_OUT = Digits("train"), Digits("held-out")


def samples(folder: Path, *, names=tuple("0123456789"), **facts) -> str:
    """Held-out digits with their labels; every 5 is a 2."""
    images = HELD_OUT.images.copy()
    twos = images[HELD_OUT.labels == 2]
    images[HELD_OUT.labels == 5] = twos[: (HELD_OUT.labels == 5).sum()]
    np.savez(folder / "samples.npz", images)
    facts = {"class_names": names, "labels": HELD_OUT.labels.tolist(), **facts}
    (folder / "samples.json").write_text(json.dumps(facts))
    return str(folder / "samples.npz")


def options(text: str, reference: str = "digits:train", **changes) -> MetricsConfig:
    return MetricsConfig(text, reference, **{"features": "pixels", **changes})


def image_folder(folder: Path, names=tuple("0123456789"), each: int = 6) -> Path:
    """A folder of grey pictures of training digits per class, saved as PNG, so RGB when read."""
    for label, name in enumerate(names):
        place = folder / "data" / name
        place.mkdir(parents=True)
        for number, image in enumerate(TRAIN.images[TRAIN.labels == label][:each]):
            Image.fromarray(image[..., 0]).save(place / f"{number}.png")
    return folder / "data"


def rgb(folder: Path, **facts) -> str:
    text = samples(folder, **facts)
    images = np.load(text)["arr_0"]
    np.savez(text, images.repeat(3, axis=3))
    return text


def test_a_class_of_wrong_images_is_the_worst(tmp_path):
    result = evaluate(options(samples(tmp_path)))
    found = result["classes"]
    assert found["labels"] == list(range(10)) and found["reference"] == "digits:train"
    assert found["samples"] == np.bincount(HELD_OUT.labels).tolist()
    assert found["real"] == np.bincount(TRAIN.labels).tolist()
    scores = np.array(found["scores"])
    assert scores.argmax() == 5 and scores[5] > 20 and np.delete(scores, 5).max() < 4
    assert found["beyond_noise"] == int((scores > 3).sum())
    assert "classes beyond 3 x noise" in report(result) and "seconds" in result
    json.dumps(result, allow_nan=False)


def test_labels_of_a_folder_of_classes_are_its_sub_folders(tmp_path):
    text, folder = rgb(tmp_path), image_folder(tmp_path)
    found = evaluate(options(text, str(folder)))["classes"]
    assert found["real"] == [6] * 10 and np.argmax(found["scores"]) == 5


def test_labelled_images_are_given_by_an_option_and_matched_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PER_CLASS", 4)
    # In alphabetical order "eight" is class 0 of the folder, and class 8 of the samples.
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    folder, text = image_folder(tmp_path, names), rgb(tmp_path, names=names)
    np.savez(tmp_path / "ref.npz", np.load(text)["arr_0"])
    given = options(text, str(tmp_path / "ref.npz"), classes=str(folder), metrics=("fid",), seed=1)
    evaluation = examine(given)
    found = evaluation.result["classes"]
    assert found["real"] == [4] * 10 and np.argmax(found["scores"]) == 5
    assert evaluation.classes.images.count == 40
    assert np.bincount(evaluation.classes.labels).tolist() == [4] * 10


def test_why_there_are_no_classes_is_said(tmp_path):
    text = samples(tmp_path)
    unlabelled = str(tmp_path / "ref.npz")
    np.savez(unlabelled, HELD_OUT.images)
    cases = {
        "the reference has no labelled images; give such by --classes": options(text, unlabelled),
        "features of single images": options(text, str(_statistics(tmp_path)), metrics=("fid",)),
    }
    for reason, given in cases.items():
        assert reason in evaluate(given)["classes"]["left_out"]
    (tmp_path / "samples.json").unlink()
    assert "labels are not known" in evaluate(options(text))["classes"]["left_out"]
    with pytest.raises(UserError, match="classes digits:train has no use: the samples' labels"):
        evaluate(options(text, classes="digits:train"))


def _statistics(folder: Path) -> Path:
    """A reference whose statistics alone are used for fid."""
    write_reference(
        folder / "own.npz", pool=Statistics.of(TRAIN.images.reshape(-1, 64) / 255), spatial=None,
        images=TRAIN.images, labels=TRAIN.labels,
        facts={"extractor": {"features": "pixels"}, "class_names": list("0123456789")},
    )  # fmt: skip
    return folder / "own.npz"


def test_classes_of_other_names_or_without_labels_are_refused_or_said(tmp_path):
    text = samples(tmp_path, names=list("abcdefghij"))
    found = evaluate(options(text))["classes"]
    assert found == {"left_out": "digits:train and the samples share no class by name"}
    np.savez(tmp_path / "ref.npy.npz", HELD_OUT.images)
    for given, message in (
        (str(tmp_path / "ref.npy.npz"), "expected labels or arr_1$"),
        (str(tmp_path / "none"), "none does not exist"),
        ("digits:train", "digits:train and the samples share no class by name"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate(options(text, classes=given))
