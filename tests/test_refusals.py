"""A command refused for its options or inputs leaves the disk as it was."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path

import pytest
from helpers import ROOT

from sit_vit5.utils.errors import UserError

TRAIN = ("train_sit.py", "--config", ROOT / "tests/tiny.yaml", "--output-dir", "new/runs")
IMAGES = ("--data.source", "digits", "--data.image-size", 8, "--codec.name", "identity")
ENCODE = ("encode", *IMAGES, "--data.workers", 0, "--out", "new/cache")
INSPECT = ("inspect", *IMAGES, "--out", "new/i.png")
SAMPLE = ("--checkpoint", "tiny", "--steps", 1)
GENERATE = ("sample/generate.py", *SAMPLE, "--num-samples", 2, "--out", "new/samples")
GRID = ("sample/grid.py", *SAMPLE, "--columns", 1, "--out", "new/g.png")
PATH = ("sample/trajectory.py", *SAMPLE, "--out", "new/p.png")
INTERPOLATE = ("sample/interpolate.py", *SAMPLE, "--out", "new/i.png")
PIXELS = ("--features", "pixels")
METRICS = ("evaluate/metrics.py", "digits:held-out", "--out", "new/metrics.json")
MAKE = ("evaluate/reference.py", "make", "digits:held-out", "--image-size", 8, "--workers", 0)
SWEEP = ("evaluate/sweep.py", *SAMPLE, "--out", "new/sweep", "--reference")
LIKELIHOOD = ("evaluate/likelihood.py", "--checkpoint", "tiny", "--out", "new/l.json")
RECONSTRUCTION = (
    "evaluate/reconstruction.py", "--image-size", 8, "--workers", 0, *PIXELS, "--out", "new/r",
    "--data",
)  # fmt: skip
ATTENTION = ("evaluate/attention.py", "--out", "new/a")
EXPORT = ("export", "--checkpoint", "tiny", "--to", "new/exported")
POSTHOC = ("posthoc-ema", "--run", "tiny", "--to", "new/averaged")

REFUSED = {
    "a batch that does not divide": (*TRAIN, "--batch-size", 15, "--accumulation", 2),
    "a batch larger than the memory": (*TRAIN, "--batch-size", 2**20, "--backbone.width", 2**15),
    "a network larger than the memory": (*TRAIN, "--backbone.width", 2**16),
    "absent data": (*TRAIN, "--data.source", "folder", "--data.path", "absent"),
    "absent weights to start from": (*TRAIN, "--init-from", "absent"),
    "an absent run to resume": ("train_sit.py", "--resume", "absent"),
    "an absent reference": (*TRAIN, "--evaluation.every", 2, "--evaluation.reference", "absent"),
    "unknown features": (
        *TRAIN, "--evaluation.every", 2, "--evaluation.reference", "digits:held-out",
        "--evaluation.features", "pixel",
    ),
    "unknown metrics": (
        *TRAIN, "--evaluation.every", 2, "--evaluation.reference", "digits:held-out",
        "--evaluation.features", "pixels", "--evaluation.metrics", "fod",
    ),
    "an unknown tracker": (*TRAIN, "--trackers", "nonsense"),
    "a patch that does not divide": (*TRAIN, "--backbone.patch-size", 3),
    "an absent autoencoder": (*TRAIN, "--codec.name", "diffusers", "--codec.path", "absent"),
    "another model on resume": ("train_sit.py", "--resume", "tiny", "--backbone.depth", 3),
    "another run's name": (*TRAIN[:3], "--output-dir", "."),
    "encoding absent data": (*ENCODE, "--data.source", "folder", "--data.path", "absent"),
    "encoding with an absent codec": (*ENCODE, "--codec.name", "diffusers"),
    "inspecting absent data": (*INSPECT, "--data.source", "folder", "--data.path", "absent"),
    "an unknown class": (*GENERATE, "--classes", "zebra"),
    "unknown weights": (*GENERATE, "--weights", "ema_0.5"),
    "absent labels": (*GENERATE, "--labels-file", "absent"),
    "too many guided channels": (*GENERATE, "--guidance.channels", 9, "--guidance.scale", 2),
    "an absent worse network": (*GENERATE, "--guidance.reference", "absent"),
    "more samples than the disk holds": (*GENERATE, "--num-samples", 10**8),
    "an unknown class of a grid": (*GRID, "--classes", "zebra"),
    "unknown weights of a grid": (*GRID, "--weights", "ema_0.5"),
    "more frames than steps": (*PATH, "--frames", 9),
    "more images than a batch": (*PATH, "--images", 99),
    "an unknown last class": (*INTERPOLATE, "--to-class", "zebra"),
    "an absent reference of metrics": (*METRICS, "--reference", "absent", *PIXELS),
    "unknown features of metrics": (*METRICS, "--reference", "digits:train", "--features", "x"),
    "unknown metrics of metrics": (
        *METRICS, "--reference", "digits:train", *PIXELS, "--metrics", "fod",
    ),
    "absent training images": (
        *METRICS, "--reference", "digits:train", *PIXELS, "--neighbours", "absent",
    ),
    "a reference of absent data": (
        *MAKE[:2], "absent", *PIXELS, "--workers", 0, "--out", "new/r.npz",
    ),
    "a reference of unknown features": (*MAKE, "--features", "x", "--out", "new/r.npz"),
    "a sweep of unknown weights": (*SWEEP, "digits:train", *PIXELS, "--weights", "ema_0.5"),
    "a sweep of unknown features": (*SWEEP, "digits:train", "--features", "x"),
    "a sweep against an absent reference": (*SWEEP, "absent", *PIXELS),
    "a likelihood of absent data": (*LIKELIHOOD, "--data", "absent"),
    "a likelihood of unknown weights": (*LIKELIHOOD, "--data", "digits:train", "--weights", "x"),
    "a reconstruction of absent data": (*RECONSTRUCTION, "absent", "--codec.name", "identity"),
    "a reconstruction by an absent codec": (
        *RECONSTRUCTION, "digits:train", "--codec.name", "diffusers", "--codec.path", "absent",
    ),
    "attention in an absent image": (*ATTENTION, "--checkpoint", "tiny", "--image", "absent"),
    "attention in an absent block": (*ATTENTION, "--checkpoint", "tiny", "--blocks", 9),
    "attention in an absent classifier": (*ATTENTION, "--classifier", "absent"),
    "an export of unknown weights": (*EXPORT, "--weights", "ema_0.5"),
    "an average without snapshots": (*POSTHOC, "--width", 0.1),
    "a conversion of an absent file": ("convert", "absent.pt", "--to", "new/converted"),
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of the tiny configuration after its first step."""
    folder = tmp_path_factory.mktemp("refusals")
    main = runpy.run_path(str(ROOT / "train_sit.py"))["main"]
    argv = [*TRAIN[1:3], "--output-dir", folder, "--steps", 1, "--preview.every", 0]
    main([*map(str, argv), "--trackers"])
    return folder


def content(folder: Path) -> dict[Path, bytes | None]:
    """Every file with its bytes, every folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_command_changes_nothing(name, run, monkeypatch):
    monkeypatch.chdir(run)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    script, *argv = REFUSED[name]
    before = content(run)
    if script.endswith(".py"):
        main = runpy.run_path(str(ROOT / script))["main"]
    else:
        main = importlib.import_module(f"sit_vit5.commands.{script.replace('-', '_')}").main
    with pytest.raises((UserError, OSError)):
        main([*map(str, argv)])
    assert content(run) == before
