"""The evaluator: which metrics, of how many images, how certain, and beside torch-fidelity."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT
from PIL import Image

from sit_vit5.config import MakeReferenceConfig, MetricsConfig
from sit_vit5.data.array_sources import Digits
from sit_vit5.evaluation import compare as module
from sit_vit5.evaluation.compare import open_reference
from sit_vit5.evaluation.evaluate import evaluate
from sit_vit5.evaluation.references import make_reference
from sit_vit5.evaluation.report import metric_name, report
from sit_vit5.metrics import METRICS, Statistics, kernel_distance, precision_recall
from sit_vit5.metrics import features as extractors
from sit_vit5.metrics.image_sets import array_set
from sit_vit5.metrics.reference import read_reference, write_reference
from sit_vit5.utils.distributed import alone
from sit_vit5.utils.errors import UserError

TRAIN, HELD_OUT = Digits("train").images, Digits("held-out").images


def npz(path: Path, images: np.ndarray, **more: np.ndarray) -> str:
    np.savez(path, arr_0=images, **more)
    return str(path)


def options(samples: str, reference: str = "digits:held-out", **changes) -> MetricsConfig:
    return MetricsConfig(samples, reference, **{"features": "pixels", **changes})


class Small:
    """Stands for Inception: its outputs, a few numbers each."""

    identity = {"features": "inception"}  # noqa: RUF012 (constant)
    outputs = ("pool", "spatial", "logits")

    def __call__(self, images, outputs=("pool",)):
        rows = images.reshape(len(images), -1)[:, 20:29] / 255
        return dict.fromkeys(outputs, rows)


def save_grey(folder: Path, images: np.ndarray, mode: str = "L") -> str:
    folder.mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image[..., 0]).convert(mode).save(folder / f"{number:04d}.png")
    return str(folder)


@pytest.fixture(scope="module")
def grey_sets(tmp_path_factory) -> dict[str, str]:
    """Sixty digits of the training part as they are stored by others."""
    folder, images = tmp_path_factory.mktemp("grey"), TRAIN[:60]
    return {
        "one channel": npz(folder / "one.npz", images),
        "three channels": npz(folder / "three.npz", np.repeat(images, 3, -1)),
        "files": save_grey(folder / "files", images),
        "files in RGB": save_grey(folder / "rgb", images, "RGB"),
    }


@pytest.mark.parametrize("kind", ["three channels", "files", "files in RGB"])
def test_one_grey_channel_equals_three_equal_ones(grey_sets, tmp_path, kind):
    values = ("frechet_distance", "kernel_distance", "precision", "recall")
    one = {key: evaluate(options(grey_sets["one channel"]))[key] for key in values}
    other = evaluate(options(grey_sets[kind]))
    assert {key: other[key] for key in values} == one
    same = evaluate(options(grey_sets["one channel"], grey_sets[kind]))
    assert same["frechet_distance"] < 1e-9
    assert "samples that are images of the reference: 60" in " ".join(same["warnings"])
    made = make_reference(
        MakeReferenceConfig(
            data=grey_sets[kind], out=str(tmp_path / "r.npz"), image_size=8, features="pixels",
            workers=0, unconditional=True,
        ),
        alone(),
    ) if kind.startswith("files") else None  # fmt: skip
    if made:
        file = read_reference(made)
        assert file.image_shape == (8, 8, 1)
        assert (file.images.images(range(60)) == TRAIN[:60]).all()
        assert evaluate(options(grey_sets["one channel"], str(made)))["frechet_distance"] < 1e-9


def test_grey_samples_and_images_in_colour_are_compared_in_colour(grey_sets, tmp_path):
    colour = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    reference = npz(tmp_path / "colour.npz", colour)
    one = evaluate(options(grey_sets["one channel"], reference))["frechet_distance"]
    assert one == evaluate(options(grey_sets["three channels"], reference))["frechet_distance"]
    stored = Statistics.of(TRAIN.reshape(len(TRAIN), -1) / 255)
    facts = {"count": 9, "image_shape": [8, 8, 1], "extractor": {"features": "pixels"}}
    write_reference(tmp_path / "r.npz", pool=stored, spatial=None, images=TRAIN[:9], labels=None,
                    facts=facts)  # fmt: skip
    with pytest.raises(UserError, match="is a reference of grey images, .* is in colour"):
        evaluate(options(reference, str(tmp_path / "r.npz")))


def test_statistics_of_other_features_are_refused_before_the_pass(tmp_path, small_inception):
    np.savez(tmp_path / "r.npz", mu=np.zeros(64), sigma=np.eye(64))
    chosen = options(npz(tmp_path / "s.npz", TRAIN[:20]), str(tmp_path / "r.npz"))
    with pytest.raises(UserError, match="samples have 9 features, the reference 64"):
        open_reference(replace(chosen, features="inception"), array_set("s", TRAIN[:20]))


@pytest.fixture
def small_inception(monkeypatch):
    monkeypatch.setattr(module, "build_extractor", lambda name, weights, option: Small())


def test_all_metrics_that_features_and_reference_allow_are_computed(tmp_path):
    result = evaluate(options(npz(tmp_path / "s.npz", TRAIN[:200])))
    sets = {"samples": TRAIN[:200].reshape(200, -1) / 255, "reference": HELD_OUT / 255}
    sets["reference"] = sets["reference"].reshape(len(HELD_OUT), -1)
    found = precision_recall(**sets)
    assert (result["precision"], result["recall"]) == (found.precision, found.recall)
    assert result["kernel_distance"] == kernel_distance(**sets).value
    assert "inception_score" not in result and "spatial_frechet_distance" not in result
    shown = report(result)
    for name in ("Frechet distance", "Precision", "Recall", "Kernel distance"):
        assert f"{name} of pixels-200 " in shown
    assert "left out" not in shown  # of what pixels never have nothing is said
    stages = {"extractor", "reference", "samples", "fid", "precision_recall", "kid"}
    assert stages <= result["seconds"].keys() and result["device"]
    assert {"torch", "scipy", "torch-fidelity", "numpy"} <= result["versions"].keys()


def test_every_metric_of_inception_is_named_as_papers_do(small_inception, tmp_path):
    samples = npz(tmp_path / "s.npz", TRAIN[:50])
    result = evaluate(options(samples, features="inception", keep_features=False))
    names = [line.split("  ")[0] for line in report(result).splitlines()]
    assert names[:6] == [
        "FID-50", "sFID-50", "Inception Score-50", "precision-50", "recall-50", "KID-50",
    ]  # fmt: skip
    assert "not comparable with values of pytorch-fid" in report(result)
    assert sum(len(metric.names) for metric in METRICS.values()) == 6


def test_chosen_metrics_are_the_only_ones(tmp_path):
    samples = npz(tmp_path / "s.npz", TRAIN[:50])
    result = evaluate(options(samples, metrics=("kid",)))
    assert "kernel_distance" in result and "frechet_distance" not in result
    assert "Frechet" not in report(result)
    with pytest.raises(UserError, match="unknown metric 'precison'; nearest: precision_recall"):
        evaluate(options(samples, metrics=("precison",)))
    with pytest.raises(UserError, match="metric sfid needs spatial features; use the features inc"):
        evaluate(options(samples, metrics=("sfid",)))


def test_precision_needs_images_where_statistics_are_not_enough(small_inception, tmp_path):
    samples = npz(tmp_path / "s.npz", TRAIN[:50])
    np.savez(tmp_path / "r.npz", mu=np.zeros(9), sigma=np.eye(9))
    given = options(samples, str(tmp_path / "r.npz"), features="inception", keep_features=False)
    result = evaluate(given)
    assert result["frechet_distance"] > 0 and "precision" not in result
    notes = " ".join(result["notes"])
    assert "precision_recall left out: it needs reference images, and" in notes
    assert "sfid left out: it needs statistics of spatial features" in notes
    for name, message in (
        ("precision_recall", "needs reference images, and .* holds statistics only; give images"),
        ("sfid", "needs statistics of spatial features, and .* holds those of pool only"),
    ):
        with pytest.raises(UserError, match=f"metric {name} {message}"):
            evaluate(options(samples, given.reference, features="inception", metrics=(name,)))


def test_stored_spatial_statistics_give_sfid(small_inception, tmp_path):
    samples = npz(tmp_path / "s.npz", HELD_OUT)
    rows = Small()(HELD_OUT)["pool"]
    mean, covariance = rows.mean(0), np.cov(rows, rowvar=False)
    reference = npz(
        tmp_path / "adm.npz", HELD_OUT, mu=mean, sigma=covariance, mu_s=mean + 1, sigma_s=covariance
    )
    result = evaluate(options(samples, reference, features="inception", keep_features=False))
    assert result["frechet_distance"] == pytest.approx(0, abs=1e-9)
    assert result["spatial_frechet_distance"] == pytest.approx(9, rel=1e-6)  # |1|^2 in 9 dimensions
    assert (result["precision"], result["recall"]) == (1, 1)


def test_of_more_samples_than_rows_are_kept_of_those_metrics_that_need_none_are_computed(
    monkeypatch, tmp_path
):
    for name in ("features", "compare"):
        monkeypatch.setattr(f"sit_vit5.evaluation.{name}.MOST_ROWS", 40)
    samples, small = npz(tmp_path / "s.npz", TRAIN[:50]), npz(tmp_path / "r.npz", TRAIN[60:90])
    result = evaluate(options(samples, small))
    assert result["frechet_distance"] > 0 and "recall" not in result
    assert "kid left out: it takes at most 40 images, the samples are 50" in result["notes"]
    with pytest.raises(UserError, match="kid: it takes at most 40 images, the samples are 50"):
        evaluate(options(samples, small, metrics=("kid",)))
    with pytest.raises(UserError, match="at most 40 images, those of the floor .* are 50"):
        evaluate(options(small, small, floor=samples))


def test_of_few_reference_images_only_what_they_allow_is_computed(tmp_path):
    few = npz(tmp_path / "few.npz", TRAIN[:3])
    result = evaluate(options(npz(tmp_path / "s.npz", TRAIN[3:50]), few))
    assert "kernel_distance" in result and "recall" not in result
    note = f"precision_recall left out: it needs 4 reference images, {few} has 3"
    assert note in result["notes"]


@pytest.mark.parametrize("count", [1, 2, 10])
def test_a_few_samples_are_evaluated_as_far_as_they_go(tmp_path, count):
    samples = npz(tmp_path / "s.npz", TRAIN[:count])
    result = evaluate(options(samples))
    assert result["frechet_distance"] > 0
    assert ("kernel_distance" in result) == (count >= 2) and ("recall" in result) == (count > 3)
    said = " ".join(result["notes"])
    assert f"{count} samples for 64 features" in said
    assert ("precision_recall left out: it needs 4 images" in said) == (count < 4)
    report(result)
    if count < 4:
        with pytest.raises(UserError, match=f"precision_recall: it needs 4 .* are {count}"):
            evaluate(options(samples, metrics=("precision_recall",)))


def test_a_distance_comes_with_its_interval_and_its_limit(tmp_path):
    samples = npz(tmp_path / "s.npz", TRAIN)
    result = evaluate(options(samples, metrics=("fid",), bootstrap=5, extrapolate=True))
    interval, line = (result["uncertainty"][key] for key in ("interval", "extrapolation"))
    assert interval["low"] < result["frechet_distance"] == interval["value"] < interval["high"]
    assert line["value"] < line["distances"][-1] < line["distances"][0]
    shown = report(result).splitlines()
    assert shown[1].startswith("its 95% interval") and "5 resamples" in shown[1]
    assert shown[2].startswith("at infinitely many samples")
    json.dumps(result, allow_nan=False)
    with pytest.raises(UserError, match="bootstrap and extrapolate are of fid"):
        evaluate(options(samples, metrics=("kid",), bootstrap=5))
    few = npz(tmp_path / "few.npz", TRAIN[:19])
    with pytest.raises(UserError, match="take 20 to 100,000 samples, found 19"):
        evaluate(options(few, extrapolate=True))
    with pytest.raises(UserError, match="bootstrap 1 must be 0, or 2"):
        options(samples, bootstrap=1)


def test_the_self_test_compares_the_reference_with_itself_and_stops_if_it_fails(
    tmp_path, monkeypatch
):
    given = options(npz(tmp_path / "s.npz", TRAIN[:50]), selftest=True)
    errors = evaluate(given)["selftest"]
    assert errors["frechet_distance"] < 1e-9 and errors["precision"] == errors["recall"] == 0
    pixels = extractors.pixels.Pixels

    class Wavering(pixels):
        def __call__(self, images, outputs=("pool",)):
            return {"pool": super().__call__(images, outputs)["pool"] * (1 + 0.01 * len(images))}

    monkeypatch.setitem(extractors.EXTRACTORS, "pixels", Wavering)
    with pytest.raises(UserError, match=r"self-test failed \(features of an image alone and among"):
        evaluate(given)


def test_only_50000_samples_are_called_50k():
    assert metric_name("inception", 50_000) == "FID-50K"
    assert metric_name("inception", 10_000) == "FID-10000"
    assert metric_name("inception", 50_000, "kernel_distance") == "KID-50K"
    assert metric_name("dinov2", 5) == "Frechet distance of dinov2-5"
    assert metric_name("timm:resnet18", 5, "recall") == "Recall of timm:resnet18-5"


def test_weights_have_one_name_each():
    with pytest.raises(UserError, match="weights and inception_weights are the same option"):
        options("s", features="inception", weights="a", inception_weights="b")
    with pytest.raises(UserError, match="inception_weights has no use with features pixels"):
        options("s", inception_weights="b")


class Images(torch.utils.data.Dataset):
    """As torch-fidelity takes them: uint8 (C, H, W)."""

    def __init__(self, images: np.ndarray):
        self.images = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.images[index]


def test_fid_is_and_kid_are_torch_fidelitys(inception_file, tmp_path):
    import torch_fidelity

    # Of many colours: random weights see little else.
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 200, (2, 6, 1, 1, 3)) * np.array([1.0, 0.7]).reshape(2, 1, 1, 1, 1)
    a, b = (colours + rng.integers(0, 56, (2, 6, 24, 20, 3))).astype(np.uint8)
    theirs = torch_fidelity.calculate_metrics(
        input1=Images(a), input2=Images(b), isc=True, fid=True, kid=True, isc_splits=1,
        samples_shuffle=False, kid_subset_size=6, cuda=False, batch_size=6, cache=False,
        save_cpu_ram=True, verbose=False, feature_extractor_weights_path=str(inception_file),
    )  # fmt: skip
    ours = evaluate(
        options(
            npz(tmp_path / "a.npz", a), npz(tmp_path / "b.npz", b), features="inception",
            weights=str(inception_file), metrics=("fid", "is", "kid"), keep_features=False,
        )
    )  # fmt: skip
    for key, name in (
        ("frechet_distance", "frechet_inception_distance"),
        ("inception_score", "inception_score_mean"),
        ("kernel_distance", "kernel_inception_distance_mean"),
    ):
        # fp32 throughout there, fp64 after the network here.
        assert ours[key] == pytest.approx(theirs[name], rel=2e-5, abs=1e-6), name
    assert theirs["frechet_inception_distance"] > 1e-2  # the comparison says something
    assert theirs["inception_score_mean"] > 1.1


def test_the_command_on_two_processes_says_what_one_process_says(command, tmp_path):
    samples, out = npz(tmp_path / "s.npz", TRAIN[:103]), tmp_path / "two.json"
    finished = command(
        "evaluate/metrics.py", samples, "--reference", "digits:held-out", "--features", "pixels",
        "--neighbours", "digits:train", "--batch-size", 10, "--out", out, processes=2,
    )  # fmt: skip
    assert finished.stdout.splitlines()[-1] == str(out) and finished.stdout.count("Recall") == 1
    alone = evaluate(options(samples, batch_size=10, neighbours="digits:train"))
    shared = json.loads(out.read_text())
    assert shared["neighbours"] == alone["neighbours"] and shared["neighbours"]["copies"] == 103
    keys = [key for metric in METRICS.values() for key in metric.names if key in alone]
    assert len(keys) == 4 and {key: shared[key] for key in keys} == {
        key: alone[key] for key in keys
    }


def test_the_python_of_readme_and_docs_runs(inception_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("weights-inception-2015-12-05-6726825d.pth").symlink_to(inception_file)
    rng = np.random.default_rng(0)
    np.save("real.npy", rng.standard_normal((4, 2048)))
    samples, reference = rng.standard_normal((2, 9, 4))
    images = rng.integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    for document in ("README.md", "docs/evaluation.md"):
        blocks = re.findall(r"(?:^    .*\n|^\n)+", (ROOT / document).read_text(), re.MULTILINE)
        (code,) = [block for block in blocks if "from sit_vit5.metrics import" in block]
        exec(textwrap.dedent(code), {"samples": samples, "reference": reference, "images": images})
    assert "PrecisionRecall" in capsys.readouterr().out
