"""Distances per class in a result: whose labels, which names, and why there are none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sit_vit5.config import MetricsConfig, ReportConfig
from sit_vit5.data.array_sources import Digits
from sit_vit5.evaluation import per_class as module
from sit_vit5.evaluation.evaluate import evaluate, examine
from sit_vit5.evaluation.page import write_page
from sit_vit5.evaluation.report import report
from sit_vit5.metrics.reference import write_reference
from sit_vit5.metrics.statistics import Statistics
from sit_vit5.utils.errors import UserError

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


def real_npz(path: Path, *, labels: np.ndarray, keep=slice(None), names=()) -> str:
    more = {"class_names": np.array(names)} if names else {}
    np.savez(path, images=TRAIN.images[keep], labels=labels[keep], **more)
    return str(path)


NO_FIVE = TRAIN.labels != 5


@pytest.mark.parametrize(
    ("real", "warning"),
    [
        (
            {"labels": TRAIN.labels - (TRAIN.labels > 5), "keep": NO_FIVE},
            "samples 0 to 9, .*real.npz 0 to 8; ",
        ),
        ({"labels": TRAIN.labels + 1}, "samples 0 to 9, .*real.npz 1 to 10; "),
        ({"labels": TRAIN.labels}, ""),
    ],
)
def test_labels_matched_by_other_numbers_are_warned_of(tmp_path, real, warning):
    given = options(samples(tmp_path), classes=real_npz(tmp_path / "real.npz", **real))
    evaluation = examine(given)
    found = [text for text in evaluation.result["warnings"] if "matched by number" in text]
    assert len(found) == bool(warning)
    if warning:
        assert re.search(warning, found[0])
        assert report(evaluation.result).startswith("warning: ")
        write_page(tmp_path / "p.html", evaluation, options=ReportConfig(), seed=0)
        page = (tmp_path / "p.html").read_text()
        assert page.count("classes are matched by number") == 2
        assert page.rindex("classes are matched by number") < page.index("all classes</summary>")


def test_raw_labels_of_a_reference_are_matched_by_number(tmp_path):
    chosen = {"arr_0": TRAIN.images, "arr_1": TRAIN.labels + 1}
    np.savez(tmp_path / "adm.npz", mu=np.zeros(64), sigma=np.eye(64), **chosen)
    result = evaluate(options(samples(tmp_path, names=[]), str(tmp_path / "adm.npz")))
    (found,) = [text for text in result["warnings"] if "matched by number" in text]
    assert "samples 0 to 9, " in found and "adm.npz 1 to 10; " in found


def test_classes_that_one_side_alone_has_are_named(tmp_path):
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    real = real_npz(tmp_path / "real.npz", labels=TRAIN.labels, names=[*names[:9], "ten"])
    result = evaluate(options(samples(tmp_path, names=names), classes=real))
    (note,) = [text for text in result["notes"] if "without a counterpart" in text]
    assert "1 of the samples alone: nine; 1 of " in note and note.endswith("alone: ten")
    assert result["classes"]["labels"] == list(range(9))


def test_a_name_of_two_classes_is_matched_to_none(tmp_path):
    names = ["crane", "crane", *"234567890"][:10]
    text = samples(tmp_path, names=names)
    same = real_npz(tmp_path / "real.npz", labels=TRAIN.labels, names=list("0123456789"))
    found = evaluate(options(text, classes=same))["classes"]
    assert 0 not in found["labels"] and 1 not in found["labels"]


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
