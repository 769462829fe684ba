"""Each likely mistake is injected and found; a clean comparison has none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sit_vit5.config import MetricsConfig
from sit_vit5.data.array_sources import Digits
from sit_vit5.evaluation.checks import Evidence, Finding, find_mistakes
from sit_vit5.evaluation.evaluate import evaluate
from sit_vit5.evaluation.features import FeatureCache, Pass
from sit_vit5.evaluation.inputs import Manifest, open_image_set
from sit_vit5.evaluation.observations import SEEN, Observations, Observing, observe
from sit_vit5.evaluation.report import report
from sit_vit5.metrics.features import build_extractor
from sit_vit5.metrics.image_sets import array_set
from sit_vit5.metrics.reference import ADM, STATISTICS, ReferenceFile, read_reference
from sit_vit5.metrics.statistics import Gaussian

RNG = np.random.default_rng(0)
# The protocol's number, at one byte an image.
MANY = array_set("samples.npz", np.zeros((50_000, 1, 1, 1), np.uint8))
UNIT = Gaussian(np.zeros(2), np.eye(2))
CLASSES = [str(number) for number in range(1000)]
CLEAN_SETTINGS = {
    "num_samples": 50_000,
    "sampler": {"precision": "fp32", "guidance": {"scale": 1.5, "interval": [0.0, 1.0]}},
}


def manifest(labels: list[int] = (), names: list[str] = (), **facts) -> Manifest:
    facts = {"complete": True, "settings": CLEAN_SETTINGS, **facts}
    return Manifest(facts, list(labels), list(names))


def reference(**changes) -> ReferenceFile:
    images = array_set("reference", RNG.integers(0, 256, (9, 1, 1, 1), np.uint8))
    return ReferenceFile(
        **{"path": Path("ref.npz"), "sha256": "r", "kind": ADM, "pool": UNIT, "images": images}
        | changes
    )


CLEAN = Evidence(
    samples=MANY,
    samples_path="samples.npy",
    reference_path="ref.npz",
    samples_sha256="s",
    reference_sha256="r",
    manifest=manifest(),
    reference=reference(),
    reference_images=reference().images,
    seen=Observations(np.arange(50_000, dtype=np.uint64), np.zeros(50_000, bool)),
    reference_seen=Observations(np.arange(60_000, 60_009, dtype=np.uint64), np.zeros(9, bool)),
)


def with_seen(digests: dict[int, int], plain: tuple[int, ...] = ()) -> Evidence:
    seen = Observations(CLEAN.seen.digests.copy(), CLEAN.seen.plain.copy())
    for image, digest in digests.items():
        seen.digests[image] = digest
    seen.plain[list(plain)] = True
    return replace(CLEAN, seen=seen)


def with_sampler(**changes) -> Evidence:
    sampler = CLEAN_SETTINGS["sampler"] | changes
    return replace(CLEAN, manifest=manifest(settings=CLEAN_SETTINGS | {"sampler": sampler}))


def with_formats(passed_over: dict[str, int] | None = None, **formats: int) -> Evidence:
    samples = array_set("folder", np.zeros((50_000, 1, 1, 1), np.uint8))
    samples.formats, samples.passed_over = formats, passed_over or {}
    return replace(CLEAN, samples=samples)


BALANCED = [number % 1000 for number in range(50_000)]
RANDOM = RNG.integers(0, 1000, 50_000).tolist()
UNSIZED = {"images": None, "kind": STATISTICS}

INJECTED = {
    "other files": (
        with_formats(passed_over={".heic": 3, ".txt": 1}, PNG=50_000),
        ("warning", "samples: 4 files passed over: 3 .heic, 1 .txt"),
    ),
    "few": (
        replace(
            CLEAN,
            manifest=manifest(settings={}),
            samples=array_set("few", np.zeros((1000, 1, 1, 1), np.uint8)),
        ),
        ("note", "1,000 samples, not the 50,000"),
    ),
    "another count": (
        replace(CLEAN, manifest=manifest(labels=[0] * 49_999)),
        ("warning", "the manifest tells of 49,999 images, the archive holds 50,000"),
    ),
    "no manifest": (replace(CLEAN, manifest=None), ("note", "no manifest beside the samples")),
    "incomplete": (
        replace(CLEAN, manifest=manifest(complete=False)),
        ("warning", "not complete"),
    ),
    "balanced labels": (
        replace(CLEAN, manifest=manifest(BALANCED, CLASSES)),
        ("note", "class-balanced; ADM's protocol, DiT and SiT draw them at random"),
    ),
    "random labels": (
        replace(CLEAN, manifest=manifest(RANDOM, CLASSES)),
        ("note", "labels are random, as in ADM's protocol"),
    ),
    "few classes": (
        replace(CLEAN, manifest=manifest([3] * 50_000, CLASSES)),
        ("warning", "999 of 1000 classes have no sample"),
    ),
    "labels without names": (
        replace(CLEAN, manifest=manifest([10**12] * 50_000, CLASSES)),
        ("warning", "the manifest has labels without a name among its 1000"),
    ),
    "JPEG samples": (with_formats(JPEG=50_000), ("warning", "samples: 50,000 lossy files .JPEG.")),
    "same file": (replace(CLEAN, samples_sha256="r"), ("warning", "are the same file")),
    "bf16": (with_sampler(precision="bf16"), ("note", "sampled in bf16")),
    "guidance of a demo": (
        with_sampler(guidance={"scale": 4.0, "interval": [0.0, 1.0]}),
        ("warning", "guidance scale 4 is one for pictures"),
    ),
    "unknown size": (
        replace(CLEAN, reference=reference(**UNSIZED), reference_images=None),
        ("note", "ref.npz does not tell the size of its images; make sure that it is 1"),
    ),
    "size in the name": (
        replace(CLEAN, reference=reference(path=Path("imagenet64_stats.npz"), **UNSIZED)),
        ("warning", "imagenet64_stats.npz names 64 pixels, the samples have 1"),
    ),
    "duplicates": (
        with_seen({7: 3, 9: 3, 100: 99}),
        ("warning", "samples that repeat an earlier one: 3, such as 3 and 7, 3 and 9, 99 and 100"),
    ),
    "plain": (
        with_seen({5: 1, 6: 1}, plain=(1, 5, 6)),  # and not called duplicates too
        ("warning", "samples of a single colour: 3, such as 1"),
    ),
    "copies": (
        with_seen({4: 60_001}),
        ("warning", "samples that are images of the reference: 1, such as 4"),
    ),
}


def test_a_clean_comparison_has_no_findings():
    assert find_mistakes(CLEAN) == []
    # Guidance in an interval may be strong: it acts for a part of the time only.
    assert not find_mistakes(with_sampler(guidance={"scale": 4.0, "interval": [0.3, 0.9]}))
    assert not find_mistakes(with_formats(PNG=50_000))
    for foreign in ({"num_samples": None}, {"num_samples": "many"}):
        said = replace(CLEAN, manifest=manifest(settings=foreign))
        assert not find_mistakes(said)
    assert not find_mistakes(with_sampler(guidance={"scale": 4.0, "interval": 5}))


@pytest.mark.parametrize("name", INJECTED)
def test_an_injected_mistake_is_the_only_one_found(name):
    evidence, (level, text) = INJECTED[name]
    (finding,) = find_mistakes(evidence)
    assert finding.level == level
    assert re.search(text, finding.text), finding.text


def test_warnings_come_before_notes():
    both = replace(with_sampler(precision="bf16"), samples_sha256="r")
    assert [finding.level for finding in find_mistakes(both)] == ["warning", "note"]


def save_samples(folder: Path, images: np.ndarray) -> Path:
    folder.mkdir()
    np.savez(folder / "samples.npz", images)
    (folder / "samples.json").write_text(json.dumps({"class_names": []}))
    return folder / "samples.npz"


def found_in(samples: Path, against: Path) -> list[Finding]:
    evidence = Evidence(
        samples=open_image_set(str(samples)),
        samples_path=str(samples),
        reference_path=str(against),
        reference=read_reference(against),
    )
    return [finding for finding in find_mistakes(evidence) if finding.level == "warning"]


def test_swapped_files_and_samples_as_reference_are_noticed(tmp_path):
    images = RNG.integers(0, 256, (4, 2, 2, 3), np.uint8)
    samples = save_samples(tmp_path / "set", images)
    real = tmp_path / "real.npz"
    np.savez(real, arr_0=images, mu=np.zeros(2), sigma=np.eye(2))
    plain = tmp_path / "plain.npz"
    np.savez(plain, images)
    swapped = [finding.text for finding in found_in(real, samples)]
    assert "real.npz holds statistics as a reference does: did you swap" in swapped[0]
    swapped = [finding.text for finding in found_in(plain, samples)]
    assert "has no manifest and the reference has one: did you swap" in swapped[0]
    assert "samples.npz are samples, not real images" in swapped[1]
    both = replace(CLEAN, reference=None, reference_path=str(tmp_path / "set"))  # as a folder
    assert "samples.npz are samples" in find_mistakes(both)[0].text


def test_jpegs_and_folders_of_the_reference_are_noted(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(tmp_path / name / "0.JPEG")
    folder = open_image_set(str(tmp_path))
    found = find_mistakes(replace(CLEAN, reference=None, reference_images=folder))
    assert [finding.level for finding in found] == ["note", "note"]
    assert "reference: 2 lossy files (JPEG)" in found[0].text
    assert "images of 2 folders are taken as one set" in found[1].text


def test_pixels_have_no_protocol():
    few = INJECTED["few"][0]
    assert not [f for f in find_mistakes(replace(few, features="pixels")) if "50,000" in f.text]
    balanced = INJECTED["balanced labels"][0]
    assert find_mistakes(replace(balanced, features="pixels")) == []


def test_the_same_is_seen_in_batches_of_any_size_and_with_or_without_features():
    images = RNG.integers(0, 256, (10, 4, 4, 3), np.uint8)
    images[3], images[6] = images[1], 77
    whole = observe(images)
    assert (np.concatenate([observe(images[:4]), observe(images[4:])]) == whole).all()
    seen = Observations.of({SEEN: whole})
    assert len(set(seen.digests.tolist())) == 9 and seen.digests[3] == seen.digests[1]
    assert seen.plain.tolist() == [n == 6 for n in range(10)]
    assert Observations.of({}) is None
    extractor = Observing(build_extractor("pixels"))
    assert extractor(images, (SEEN,)).keys() == {SEEN}
    both = extractor(images, (SEEN, "pool"))
    assert (both[SEEN] == whole).all() and (both["pool"] == images.reshape(10, -1) / 255).all()
    assert extractor(images).keys() == {"pool"}


def test_the_evaluator_says_what_it_found(tmp_path):
    images = Digits("train").images.copy()
    images[7], images[9] = images[3], 0
    np.savez(tmp_path / "samples.npz", images)
    result = evaluate(
        MetricsConfig(str(tmp_path / "samples.npz"), "digits:train", features="pixels")
    )
    for said in (
        "samples of a single colour: 1, such as 9",
        "samples that repeat an earlier one: 1, such as 3 and 7",
        "samples that are images of the reference: 1,436, such as 0",
    ):
        assert any(said in warning for warning in result["warnings"]), said
    assert result["samples_formats"] == {}
    assert f"warning: {result['warnings'][0]}" in report(result)


def test_what_was_seen_is_kept_with_the_features(tmp_path):
    class Counting:
        identity, outputs, calls = {"features": "mean"}, ("pool",), 0

        def __call__(self, images: np.ndarray, outputs: tuple[str, ...]) -> dict[str, np.ndarray]:
            Counting.calls += 1
            return {"pool": images.mean(axis=(1, 2))}

    images = array_set("a", RNG.integers(0, 256, (10, 2, 2, 3), np.uint8))
    features = Pass(Observing(Counting()), 4, FeatureCache(tmp_path, 10**9))
    first, second = (
        features.describe(images, rows=["pool"], statistics=[], identity="a", title="a")
        for _ in range(2)
    )
    assert Counting.calls == 3  # batches of 4, 4 and 2, once
    assert (first.rows[SEEN] == second.rows[SEEN]).all()
    assert (second.rows[SEEN] == observe(images.images(range(10)))).all()
