"""The evaluation command: what it reads, what it refuses, what it reports."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sit_vit5.config import MetricsConfig
from sit_vit5.data.array_sources import Digits
from sit_vit5.evaluation.compare import choose_metrics, find_source
from sit_vit5.evaluation.evaluate import evaluate
from sit_vit5.evaluation.inputs import open_image_set
from sit_vit5.evaluation.report import check_results, json_path, report
from sit_vit5.metrics.fid import frechet_distance
from sit_vit5.metrics.statistics import Statistics
from sit_vit5.report.html import document
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import file_hash, write_json


def digits_npz(folder: Path, split: str = "train", **manifest) -> Path:
    source = Digits(split)
    folder.mkdir(exist_ok=True)
    np.savez(folder / "samples.npz", source.images)
    facts = {"labels": source.labels.tolist(), "class_names": list("0123456789"), **manifest}
    (folder / "samples.json").write_text(json.dumps(facts))
    return folder / "samples.npz"


def options(samples: Path, reference: str, **changes) -> MetricsConfig:
    return MetricsConfig(str(samples), str(reference), **{"features": "pixels", **changes})


def test_real_digits_score_the_floor_and_agree_with_their_labels(tmp_path):
    samples = digits_npz(tmp_path, "train", settings={"sampler": {"method": "none"}})
    chosen = options(samples, "digits:held-out", floor="digits:train", agreement="digits")
    result = evaluate(chosen)
    a, b = (Statistics.of(Digits(s).images.reshape(-1, 64) / 255) for s in ("train", "held-out"))
    expected = frechet_distance(a.mean, a.covariance, b.mean, b.covariance)
    assert result["frechet_distance"] == pytest.approx(expected, rel=1e-9)
    assert result["floor"]["frechet_distance"] == pytest.approx(expected, rel=1e-9)
    assert result["floor"]["count"] == 1437
    assert result["agreement"]["samples"] > 0.99  # the classifier has seen these
    assert 0.9 < result["agreement"]["held_out"] < 1
    text = report(result)
    assert "Frechet distance of pixels-1437" in text and "method none" in text
    write_json(json_path(chosen), result)
    saved = json.loads((tmp_path / "metrics.json").read_text())
    assert saved["samples_sha256"] == file_hash(samples)
    assert saved["manifest"]["settings"] == {"sampler": {"method": "none"}}
    assert saved["count"] == 1437 and saved["reference_count"] == 360


def test_agreement_falls_to_chance_for_shuffled_labels(tmp_path):
    samples = digits_npz(tmp_path)
    manifest = json.loads((tmp_path / "samples.json").read_text())
    np.random.default_rng(0).shuffle(manifest["labels"])
    (tmp_path / "samples.json").write_text(json.dumps(manifest))
    result = evaluate(options(samples, "digits", agreement="digits"))
    assert 0.05 < result["agreement"]["samples"] < 0.16


def test_the_result_does_not_depend_on_the_batch_size(tmp_path):
    samples = digits_npz(tmp_path)
    values = [
        evaluate(options(samples, "digits", batch_size=size))["frechet_distance"]
        for size in (7, 100, 5000)
    ]
    assert max(values) - min(values) < 1e-10


def test_a_set_against_itself_is_zero_from_npz_and_folder(tmp_path):
    samples = digits_npz(tmp_path / "npz", "held-out")
    folder = tmp_path / "png"
    folder.mkdir()
    for number, image in enumerate(np.load(samples)["arr_0"]):
        Image.fromarray(image.repeat(3, axis=2)).save(folder / f"{number:04d}.PNG")
    rgb = tmp_path / "rgb.npz"
    np.savez_compressed(rgb, np.load(samples)["arr_0"].repeat(3, axis=3))
    assert abs(evaluate(options(folder, rgb))["frechet_distance"]) < 1e-10
    assert abs(evaluate(options(samples, samples))["frechet_distance"]) < 1e-10


def test_few_samples_and_a_missing_manifest_are_noted(tmp_path):
    np.savez(tmp_path / "few.npz", Digits("train").images[:20])
    notes = " ".join(evaluate(options(tmp_path / "few.npz", "digits"))["notes"])
    assert "no manifest" in notes and "20 samples for 64 features" in notes


def test_lossy_samples_are_noted(tmp_path):
    for number in range(3):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.jpg")
    np.savez(tmp_path / "ref.npz", np.zeros((4, 8, 8, 3), np.uint8))
    result = evaluate(options(tmp_path, tmp_path / "ref.npz"))
    assert any("samples: 3 lossy files (JPEG)" in warning for warning in result["warnings"])
    assert "warning: samples: 3 lossy files" in report(result)
    notes = result["notes"]
    assert any("4 reference images for 192 features" in note for note in notes)


def test_stored_statistics_are_for_inception_only(tmp_path):
    np.savez(tmp_path / "stats.npz", mu=np.zeros(64), sigma=np.eye(64))
    with pytest.raises(UserError, match="of another extractor .features inception, here pixels"):
        evaluate(options(digits_npz(tmp_path / "s"), tmp_path / "stats.npz"))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 8, 8, 1), np.float32), "expected uint8 images"),
        (np.zeros((3, 8, 8), np.uint8), "expected uint8 images"),
        (np.zeros((3, 1, 8, 8), np.uint8), "expected uint8 images"),
        (np.zeros((0, 8, 8, 1), np.uint8), "holds no image"),
        (np.zeros((3, 0, 8, 1), np.uint8), "holds no image"),
        (np.zeros((3, 4, 4, 1), np.uint8), "give a reference of the samples' size"),
        (np.asfortranarray(np.zeros((3, 8, 8, 3), np.uint8)), "Fortran order"),
    ],
)
def test_samples_of_a_wrong_kind_are_refused(tmp_path, array, message):
    np.savez(tmp_path / "bad.npz", array)
    with pytest.raises(UserError, match=message):
        evaluate(options(tmp_path / "bad.npz", "digits"))


def test_wrong_files_say_what_was_found_and_what_was_expected(tmp_path):
    np.savez(tmp_path / "keys.npz", images=np.zeros(3), labels=np.zeros(3))
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "mixed" / "a.png")
    Image.new("RGB", (8, 6)).save(tmp_path / "mixed" / "b.png")
    good = digits_npz(tmp_path / "good")
    cases = [
        (tmp_path / "keys.npz", "digits", "keys.npz holds images, labels; expected arr_0"),
        (tmp_path / "text.npz", "digits", "text.npz is not an npz file"),
        (tmp_path / "empty", "digits", "empty holds no image .looked for .png"),
        (tmp_path / "absent", "digits", "absent' does not exist; give an npz"),
        (good, tmp_path / "keys.npz", "expected arr_0 .*, or mu and sigma"),
        (good, "digit", "digit' does not exist; give an npz, a folder of images, or one of digits"),
    ]
    for samples, reference, message in cases:
        with pytest.raises(UserError, match=message) as error:
            evaluate(options(samples, reference))
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"b.png is 8x6, the others 8x8"):
        list(open_image_set(str(tmp_path / "mixed")).batches(4))


def test_pickled_arrays_are_refused(tmp_path):
    np.savez(tmp_path / "objects.npz", np.array([{"code": 1}], dtype=object))
    with pytest.raises(UserError, match="expected uint8"):
        evaluate(options(tmp_path / "objects.npz", "digits"))


def test_unknown_features_and_missing_labels_are_refused(tmp_path):
    samples = digits_npz(tmp_path)
    with pytest.raises(UserError, match="unknown features 'pixel'; nearest: pixels"):
        evaluate(options(samples, "digits", features="pixel"))
    with pytest.raises(UserError, match="not a labelled built-in set"):
        evaluate(options(samples, "digits", agreement="mnist"))
    (tmp_path / "samples.json").unlink()
    with pytest.raises(UserError, match="agreement needs the asked labels"):
        evaluate(options(samples, "digits", agreement="digits"))


def test_stored_statistics_are_used_for_inception_and_their_images_tell_the_size(tmp_path):
    samples = open_image_set(str(digits_npz(tmp_path / "s")))
    statistics = {"mu": np.arange(3.0), "sigma": np.eye(3)}
    cases = {
        "plain": (statistics, {"fid"}),
        "adm": (statistics | {"arr_0": Digits("held-out").images}, {"fid", "precision_recall"}),
    }
    for name, (arrays, allowed) in cases.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
        source = find_source(str(tmp_path / f"{name}.npz"), {"features": "inception"}, samples)
        np.testing.assert_array_equal(source.stored["pool"].mean, statistics["mu"])
        np.testing.assert_array_equal(source.stored["pool"].covariance, statistics["sigma"])
        found, _ = choose_metrics((), ("pool", "spatial", "logits"), source)
        assert allowed <= found.keys() and "sfid" not in found and "is" in found
        assert ("kid" in found) == (name == "adm")
    np.savez(tmp_path / "other.npz", arr_0=np.zeros((4, 4, 4, 1), np.uint8), **statistics)
    with pytest.raises(UserError, match="give a reference of the samples' size"):
        find_source(str(tmp_path / "other.npz"), {"features": "inception"}, samples)


def test_damaged_archives_are_refused_in_one_line(tmp_path):
    good = digits_npz(tmp_path / "good").read_bytes()

    def damaged(name: str, data: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    with zipfile.ZipFile(tmp_path / "header.npz", "w") as archive:
        archive.writestr("arr_0.npy", b"no header at all")
    with zipfile.ZipFile(tmp_path / "name.npz", "w") as archive:
        archive.writestr("arr_0", b"")
    for path in (
        damaged("cut.npz", good[:-200]),
        damaged("bits.npz", good[:5000] + bytes(100) + good[5100:]),
        tmp_path / "header.npz",
        tmp_path / "name.npz",
    ):
        with pytest.raises(UserError, match="damaged|is not an npz file") as error:
            evaluate(options(path, "digits"))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "facts",
    [
        "[]", "{", '{"class_names": 5}', '{"class_names": [], "labels": 5}',
        '{"class_names": [], "labels": ["a"]}', '{"class_names": [], "settings": []}',
        '{"class_names": [], "settings": {"sampler": "x"}}',
        '{"class_names": [], "settings": {"sampler": [["a", 1]]}}', '{"class_names": [], "x": NaN}',
        '{"class_names": [], "settings": {"codec": "x"}}', '{"class_names": [], "versions": [1]}',
        '{"class_names": [], "settings": {"model": 3}}', '{"class_names": [], "device": 5}',
        '{"class_names": [3]}', '{"class_names": [["a"]]}', '{"class_names": ["\\ud800"]}',
        '{"class_names": [], "command": "\\ud800"}', '{"class_names": [], "labels": [-1]}',
        '{"class_names": [], "labels": [1.0]}', f'{{"class_names": [], "labels": [{2**63}]}}',
        '{"class_names": [], "complete": 1}', '{"class_names": [], "evaluations_per_image": "4"}',
        pytest.param("[" * 100_000, id="deep"), "\ufeff{}", "",
    ],
)  # fmt: skip
def test_manifests_of_another_kind_are_refused(tmp_path, facts):
    samples = digits_npz(tmp_path)
    (tmp_path / "samples.json").write_text(facts)
    with pytest.raises(UserError, match="is not a manifest of samples"):
        evaluate(options(samples, "digits"))


def test_a_manifest_of_another_archive_is_refused(tmp_path):
    samples = digits_npz(tmp_path, samples_sha256="0" * 64)
    with pytest.raises(UserError, match="written for another .*the hashes differ"):
        evaluate(options(samples, "digits"))
    other = digits_npz(tmp_path, class_names=["a", "b"])
    with pytest.raises(UserError, match="are not the digits"):
        evaluate(options(other, "digits", agreement="digits"))


def test_the_result_never_replaces_a_manifest_or_another_result(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert json_path(options("a/samples.npz", "r")) == Path("a/metrics.json")
    assert json_path(options("a/b.npz", "r")) == Path("a/b.metrics.json")
    assert json_path(options("metrics.npz", "r")) == Path("metrics.metrics.json")
    assert json_path(options(".", "r")) == Path("metrics.json")
    assert json_path(options("digits:train", "r")) == Path("digits-train.metrics.json")
    with pytest.raises(UserError, match="manifest"):
        json_path(options("a/samples.npz", "r", out="a/../a/samples.json"))
    with pytest.raises(UserError, match="must end in .json"):
        json_path(options("a/samples.npz", "r", out="a/samples.npz"))


def test_results_replace_results_and_nothing_else(tmp_path):
    ours, page = tmp_path / "metrics.json", tmp_path / "report.html"
    check_results(ours, page, None)
    write_json(ours, {"command": "x", "versions": {}})
    page.write_text(document(title="s: evaluation", style="", body=""))
    check_results(ours, page)
    for path, text in ((ours, '{"name": "mine"}'), (ours, "mine"), (page, "<title>mine</title>")):
        path.write_text(text)
        with pytest.raises(UserError, match=f"{path.name} exists and is no result of an evalu"):
            check_results(path)
        assert path.read_text() == text


def test_pixels_of_large_images_are_refused_before_they_fill_the_memory(tmp_path):
    np.savez(tmp_path / "big.npz", np.zeros((2, 256, 256, 3), np.uint8))
    with pytest.raises(UserError, match="pixels are for small images: 196,608"):
        evaluate(options(tmp_path / "big.npz", tmp_path / "big.npz"))
