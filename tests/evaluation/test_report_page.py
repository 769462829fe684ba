"""report.html: whole, alone, escaped and small; what it says and shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import BROWSER, Page, run_here, screenshot
from PIL import Image

from sit_vit5.config import MetricsConfig, ReportConfig
from sit_vit5.data.array_sources import Digits
from sit_vit5.evaluation.evaluate import Evaluation, examine
from sit_vit5.evaluation.inputs import Manifest
from sit_vit5.evaluation.page import command_of, write_page
from sit_vit5.evaluation.protocol import differences, protocol_notes, published_rows
from sit_vit5.evaluation.real_sets import RealSet
from sit_vit5.evaluation.report import page_path
from sit_vit5.metrics.image_sets import array_set
from sit_vit5.metrics.reference import write_reference
from sit_vit5.metrics.statistics import Statistics
from sit_vit5.utils.errors import UserError

EVIL = '<script src="http://evil">"&'
NAMES = [EVIL, *"123456789"]
TRAIN, HELD_OUT = Digits("train"), Digits("held-out")


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory) -> Evaluation:
    """Real digits as samples, each 3 replaced by the same 8, and 5 training images."""
    folder = tmp_path_factory.mktemp("<b>") / "samples"
    folder.mkdir()
    images = np.concatenate([HELD_OUT.images, TRAIN.images[:5]])
    labels = np.concatenate([HELD_OUT.labels, TRAIN.labels[:5]])
    images[:360][HELD_OUT.labels == 3] = HELD_OUT.images[HELD_OUT.labels == 8][0]
    np.savez(folder / "samples.npz", images)
    settings = {
        "model": "ViT5-Nano/2", "step": 1000, "weights": "ema_0.995", "weights_sha256": "ab" * 32,
        "sampler": {"method": "heun", "steps": 25, "guidance": {"scale": 1.5}, "precision": "fp32"},
    }  # fmt: skip
    facts = {
        "class_names": NAMES, "labels": labels.tolist(), "settings": settings, "command": EVIL,
        "evaluations_per_image": 50, "network_passes_per_image": 100,
    }  # fmt: skip
    (folder / "samples.json").write_text(json.dumps(facts))
    write_reference(
        folder / "ref.npz",
        pool=Statistics.of(TRAIN.images.reshape(-1, 64) / 255),
        spatial=None,
        images=TRAIN.images,
        labels=TRAIN.labels,
        facts={"extractor": {"features": "pixels"}, "class_names": NAMES, "count": 1437},
    )
    return examine(
        MetricsConfig(
            str(folder / "samples.npz"), str(folder / "ref.npz"), features="pixels",
            neighbours="digits:train", bootstrap=2,
        )
    )  # fmt: skip


def written(folder: Path, evaluation: Evaluation, **options) -> str:
    path = folder / "report.html"
    write_page(path, evaluation, options=ReportConfig(**options), seed=0)
    return path.read_text()


def test_page_is_well_formed_alone_and_escaped(evaluation, tmp_path):
    text = written(tmp_path, evaluation)
    page = Page(text)
    assert EVIL in page.text and not {"script", "link", "iframe"} & set(page.tags)
    assert "<b>" in page.text  # of the folder's name
    assert "@import" not in text and "url(" not in text and " on" not in str(page.attributes)
    assert page.links() and all(link.startswith("data:image/") for link in page.links())
    assert len(text) < 200_000


def test_page_tells_values_uncertainty_protocol_and_remarks(evaluation, tmp_path):
    text, result = Page(written(tmp_path, evaluation)).text, evaluation.result
    assert f"{result['frechet_distance']:.4f}" in text and "its 95% interval" in text
    for fact in (
        "50 velocity evaluations (NFE), 100 network passes", "guidance.scale 1.5", "ema_0.995",
        "ab" * 32, result["samples_sha256"], result["reference_sha256"], "precision fp32",
        "features pixels", result["versions"]["torch"], "ViT5-Nano/2", "1,437",
    ):  # fmt: skip
        assert fact in text, fact
    assert result["warnings"] and all(f"warning {said}" in text for said in result["warnings"])
    assert all(f"note {said}" in text for said in result["notes"])
    assert "Beside published values" not in text  # these are digits


def test_page_shows_the_planted_class_first_and_the_copies(evaluation, tmp_path):
    text = Page(written(tmp_path, evaluation)).text
    worst = text[text.index("Worst") :].removeprefix("Worst")
    assert worst.startswith("3 ") and "x noise" in worst
    assert "5 of 365 samples are training images pixel by pixel" in text
    found = evaluation.result["neighbours"]
    assert found["copies"] == 5 and set(found["copied"]) == set(range(360, 365))
    pairs = found["closest"]
    assert {pair["sample"] for pair in pairs[:5]} == set(range(360, 365))
    assert all(pair["nearest"][0] == pair["sample"] - 360 for pair in pairs[:5])


def test_the_grid_is_a_random_choice_by_the_seed(evaluation, tmp_path):
    def links(seed: int, images: int) -> list[str]:
        path = tmp_path / "page.html"
        write_page(path, evaluation, options=ReportConfig(images=images), seed=seed)
        return Page(path.read_text()).links()

    assert links(0, 12) == links(0, 12) != links(1, 12)
    assert len(links(0, 30)) - len(links(0, 12)) == 18


def test_a_page_without_manifest_labels_or_neighbours_says_what_is_missing(tmp_path):
    np.savez(tmp_path / "s.npz", HELD_OUT.images[:20])
    found = examine(
        MetricsConfig(str(tmp_path / "s.npz"), "digits:train", features="pixels", metrics=("fid",))
    )
    text = Page(written(tmp_path, found)).text
    assert "No distances per class: the samples' labels are not known" in text
    assert "Not looked for: --neighbours DATA" in text
    assert "no manifest beside the samples" in text and "20 of 20" in text


def test_the_command_of_a_manifest_makes_some_of_its_images():
    words = "sample/generate.py --checkpoint 'my runs/a' --out s --guidance.scale 1.5 --png True"
    facts = {"command": f"{words} --classes 3 7 --out=s --seed 4"}
    command = command_of(Manifest(facts, [3, 7] * 10, []), [4, 17])
    assert command == (
        "python sample/generate.py --checkpoint 'my runs/a' --guidance.scale 1.5 --classes 3 7 "
        "--seed 4 --indices 4 17 --png True"
    )
    facts["settings"] = {"indices": [90, 80, 70]}
    again = Manifest(facts | {"command": "generate.py --indices 90 80 70"}, [0] * 3, [])
    assert command_of(again, [0, 2]) == "python generate.py --indices 90 70 --png True"
    for other in (None, "evaluate/sweep.py --checkpoint a", "generate.py 'open", ""):
        assert not command_of(Manifest({"command": other}, [0], []), [0])
    assert not command_of(None, [0])


def large(seed: int, count: int) -> np.ndarray:
    """256x256 images as smooth as photographs are."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (count, 40, 40, 3), dtype=np.uint8)
    images = [
        Image.fromarray(image).resize((256, 256), Image.Resampling.BICUBIC) for image in small
    ]
    return np.stack([np.asarray(image) for image in images])


def of_imagenet(**changes) -> Evaluation:
    """A made-up result of 256x256 images."""
    labels = [n % 8 for n in range(48)]
    names = [f"class {n}" for n in range(1000)]
    manifest = {"class_names": names, "labels": labels, "settings": {"labels": "random"}}
    column = list(range(8))
    pair = {"nearest": [0, 1, 2, 3], "distances": [1.0, 2.0, 3.0, 4.0]}
    result = {
        "samples": "s.npz", "samples_sha256": None, "samples_formats": {}, "count": 50_000,
        "image_shape": [256, 256, 3], "reference": "VIRTUAL_imagenet256_labeled.npz",
        "reference_sha256": "cd", "reference_count": 1_281_167, "command": "c", "device": "cpu",
        "extractor": {"features": "inception"}, "frechet_distance": 1.9, "inception_score": 280.0,
        "warnings": [], "notes": [], "seconds": {}, "versions": {}, "manifest": manifest,
        "classes": {
            "reference": "r", "labels": column, "samples": column, "real": column,
            "distances": column, "noise": column, "scores": column, "beyond_noise": 4,
        },
        "neighbours": {
            "training": "t", "count": 48, "features": "f", "queries": 48, "left_out": 48,
            "percentile": 1.0, "median": 1.0, "real_median": 1.0, "threshold": 1.0, "closer": 0.0,
            "limit": 0.02, "copies": 0, "copied": [],
            "random": [{"sample": n, **pair} for n in range(6)],
            "closest": [{"sample": n, **pair} for n in range(6)],
        },
        **changes,
    }  # fmt: skip
    samples, real = (array_set(f"set {seed}", large(seed, 48)) for seed in range(2))
    return Evaluation(
        result,
        samples,
        Manifest(manifest, labels, names),
        RealSet(real, np.array(labels)),
        real,
    )


@pytest.fixture(scope="module")
def imagenet() -> Evaluation:
    return of_imagenet()


def test_large_images_do_not_blow_the_page_up(imagenet, tmp_path):
    text = written(tmp_path, imagenet)
    assert len(text) < 1_500_000
    assert sum(link.startswith("data:image/jpeg") for link in Page(text).links()) == 36 + 96 + 60


def test_published_values_stand_beside_those_of_imagenet_only(imagenet, tmp_path):
    text = Page(written(tmp_path, imagenet)).text
    assert "this evaluation" in text and "1.9" in text and "Not comparable" not in text
    assert all(entry.model in text and entry.source in text for entry in published_rows())
    changes = {
        "extractor": {"features": "dinov2"},
        "image_shape": [64, 64, 3],
    }
    for key, value in changes.items():
        other = replace(imagenet, result={**imagenet.result, key: value})
        assert "Beside published" not in Page(written(tmp_path, other)).text
    unnamed = {**imagenet.result, "manifest": None, "reference": "flowers.npz"}
    assert "Beside published" not in Page(written(tmp_path, replace(imagenet, result=unnamed))).text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"count": 10_000}, "10,000 samples instead of 50,000"),
        ({"reference_count": None}, "the statistics of VIRTUAL_imagenet256_labeled.npz are not"),
        ({"reference_count": 10_000}, "a reference of 10,000 images"),
        ({"manifest": None}, "how the labels were drawn is not known"),
        (
            {"manifest": {"class_names": [""] * 1000, "settings": {"labels": "balanced"}}},
            "labels balanced: those of DiT",
        ),
    ],
)
def test_what_keeps_values_from_being_compared_is_said(imagenet, tmp_path, change, said):
    other = replace(imagenet, result={**imagenet.result, **change})
    text = Page(written(tmp_path, other)).text
    assert "Not comparable as it stands" in text and said in text


def made_by(step: int = 400_000, scale: float = 1.0, **changes) -> dict:
    """A result of an unguided ViT-5-XL as its manifest tells it."""
    guidance = {"scale": scale, "channels": changes.pop("channels", None)}
    sampler = {"method": "euler_maruyama", "steps": 250, "guidance": guidance} | changes
    settings = {"labels": "random", "model": "ViT5-XL/2", "step": step, "sampler": sampler}
    manifest = {"class_names": [""] * 1000, "labels": [], "settings": settings}
    return of_imagenet(manifest=manifest).result


def test_an_unguided_result_stands_beside_the_published_curve(imagenet, tmp_path):
    page = Page(written(tmp_path, replace(imagenet, result=made_by())))
    assert "Beside the published training curve" in page.text
    for row in ("ViT-5-XL/2, published18.716.414.6", "SiT-XL/2, published25.620.117.1"):
        assert row in page.text.replace("\n", "")
    assert "this evaluation1.9" in page.text.replace("\n", "")
    assert protocol_notes(made_by()) == [
        "published FID-50K without guidance at 400,000 steps: ViT-5-XL/2 14.6, SiT-XL/2 17.1 "
        "(arXiv 2602.08071, figure 6, read off it)"
    ]
    for result in (made_by(scale=1.5, channels=3), imagenet.result):
        page = Page(written(tmp_path, replace(imagenet, result=result)))
        assert "training curve" not in page.text
    assert protocol_notes(made_by(step=123)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "heun", "steps": 50}, "sampled by the ODE solver heun"),
        ({"steps": 50}, "50 steps of the SDE"),
        ({"scale": 1.5}, "guided on all channels"),
        ({"scale": 1.5, "channels": 4}, "guided on all channels"),
    ],
)
def test_another_sampler_than_the_published_one_is_noted(changes, said):
    result = made_by(**changes)
    assert any(note.startswith(said) for note in protocol_notes(result))
    assert any(text.startswith(said) for text in differences(result))
    assert not protocol_notes(result | {"extractor": {"features": "dinov2"}})


def test_published_values_are_those_of_the_configurations():
    values = {(entry.model, entry.training, entry.guidance): entry for entry in published_rows()}
    assert len(values) == len(published_rows())
    assert all(entry.source for entry in published_rows())
    for model, fid, score in (
        ("DiT-XL/2", 2.27, 278.2), ("SiT-XL/2", 2.06, 277.5), ("ViT-5-XL/2", 1.84, 282.7),
    ):  # fmt: skip
        entry = values[model, "7M steps", "1.5"]
        assert (entry.fid, entry.score) == (fid, score)


def test_the_page_lies_beside_the_json():
    def path(json: str, **options) -> Path | None:
        given = MetricsConfig("s", "r", report=ReportConfig(**options))
        return page_path(given, Path(json))

    assert path("a/metrics.json") == Path("a/report.html")
    assert path("a/b.metrics.json") == Path("a/b.report.html")
    assert path("a/mine.json") == Path("a/mine.html")
    assert path("a/mine.json", out="b.html") == Path("b.html")
    assert path("a/mine.json", write=False) is None
    with pytest.raises(UserError, match=r"report.out b.json must end in .html"):
        path("a/mine.json", out="b.json")
    with pytest.raises(UserError, match=r"report.out b.html has no use with report.write False"):
        path("a/mine.json", out="b.html", write=False)


def test_the_command_writes_the_page_unless_told_not_to(tmp_path, capsys):
    np.savez(tmp_path / "samples.npz", HELD_OUT.images)
    words = (tmp_path / "samples.npz", "--reference", "digits:train", "--features", "pixels")
    run_here("evaluate/metrics.py", *words, "--report.write", "False")
    assert not list(tmp_path.glob("*.html"))
    run_here("evaluate/metrics.py", *words)
    page, table = capsys.readouterr().out.splitlines()[-2:]
    assert (page, table) == (str(tmp_path / "report.html"), str(tmp_path / "metrics.json"))
    assert "Frechet distance of pixels" in Page(Path(page).read_text()).text


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on this machine")
def test_a_browser_shows_the_page(imagenet, tmp_path):
    written(tmp_path, imagenet)
    pixels = screenshot(tmp_path / "report.html", tmp_path, width=1100, height=2600)
    gaudy = pixels.max(2) - pixels.min(2) > 40  # images; the page itself is grey
    assert gaudy.mean() > 0.05
