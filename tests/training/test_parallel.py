"""Two and four processes, each with the whole model or with a part of it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TINY, assert_equal, command_environment, command_line, final_tensors
from test_trainer import config, rows, trainer

from sit_vit5.models.checkpoint import open_checkpoint
from sit_vit5.utils.errors import UserError

LAUNCHED = "tests/training/launched.py"


def launch(processes: int, *runs: list[object]) -> str:
    """What the processes printed, run after run."""
    finished = subprocess.run(
        command_line(LAUNCHED, json.dumps([[*map(str, run)] for run in runs]), processes=processes),
        cwd=ROOT, env=command_environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Runs of six steps on one, two and four processes, stopped, moved and resumed."""
    folder = tmp_path_factory.mktemp("runs")

    def fresh(name: str, *argv: object) -> list[object]:
        return [*TINY, "--output-dir", folder, "--name", name, "--accumulation", 2, *argv]

    def resumed(name: str, *argv: object) -> list[object]:
        return ["--resume", folder / name, "--steps", 6, *argv]

    muon = ("--optimizer.name", "muon")
    cut, widths = ("--parallel", "fsdp2"), ("--ema.widths", 0.1, "--ema.snapshot-every", 6)
    evaluated = (
        "--evaluation.every", 6, "--evaluation.reference", "digits:held-out", "--evaluation.steps",
        1, "--evaluation.features", "pixels", "--evaluation.num-samples", 40,
        "--evaluation.batch-size", 8,
    )  # fmt: skip
    said = launch(
        2,
        fresh("two", *widths, *evaluated),
        fresh("stopped", *widths, "--steps", 3),
        resumed("stopped"),
        fresh("moved", "--steps", 2),
        fresh(
            "cut",
            *cut,
            "--ema.widths",
            0.1,
            "--ema.snapshot-every",
            6,
            "--preview.every",
            6,
            *evaluated,
        ),
        fresh("cut stopped", *cut, "--steps", 3),
        resumed("cut stopped"),
        fresh("muon two", *muon),
        fresh("muon stopped", *muon, "--steps", 3),
        resumed("muon stopped"),
        fresh("muon cut", *cut, *muon),
        ["ACCELERATE_USE_FSDP=true", "FSDP_VERSION=2", *fresh("told", "--steps", 2)],
    )
    (folder / "two.txt").write_text(said)
    trainer(config(folder, "--accumulation", 2, name="one")).run()
    trainer(config(folder, "--accumulation", 2, *muon, name="muon one")).run()
    moved = open_checkpoint(folder / "moved").config
    trainer(replace(moved, steps=4), resume=folder / "moved").run()
    launch(4, resumed("moved", *cut), fresh("four", *cut, *evaluated))
    return folder


@pytest.mark.parametrize("name", ["two", "cut", "four", "moved"])
def test_processes_train_like_one_up_to_rounding(folder, name):
    one, many = final_tensors(folder / "one"), final_tensors(folder / name)
    for key in one:
        assert (one[key] - many[key]).abs().max() < 1e-5, key
    losses = [[row["loss"] for row in rows(folder / run)] for run in ("one", name)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("name", ["muon two", "muon cut"])
def test_processes_share_muons_matrices_up_to_rounding(folder, name):
    one, many = final_tensors(folder / "muon one"), final_tensors(folder / name)
    assert "optimizer/momentum.blocks.0.attention.qkv.weight" in one
    for key in one:
        torch.testing.assert_close(many[key], one[key], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("whole", "stopped"),
    [("two", "stopped"), ("cut", "cut stopped"), ("muon two", "muon stopped")],
)
def test_a_resumed_run_equals_the_undisturbed_one_to_the_bit(folder, whole, stopped):
    stopped = final_tensors(folder / stopped)
    whole = {key: tensor for key, tensor in final_tensors(folder / whole).items() if key in stopped}
    assert_equal(whole, stopped)


def test_a_cut_model_is_saved_drawn_and_snapshot_whole(folder):
    assert (folder / "cut" / "samples" / "step_0000006.png").is_file()
    snapshots = [[*(folder / run / "ema_snapshots").iterdir()] for run in ("two", "cut")]
    assert [[path.name for path in found] for found in snapshots] == [
        ["step_0000006_width_0.1.safetensors"]
    ] * 2
    said = (folder / "two.txt").read_text()
    assert said.count("cut over the processes") == 5  # cut, cut stopped twice, muon cut, told


def test_processes_draw_and_evaluate_the_same_samples(folder):
    found = [
        json.loads((folder / run / "evaluations.jsonl").read_text())
        for run in ("two", "cut", "four")
    ]
    values = [row["values"]["Frechet distance of pixels-40"] for row in found]
    assert [row["step"] for row in found] == [6, 6, 6]
    assert values == pytest.approx([values[0]] * 3, rel=1e-3)  # pixels are rounded to bytes


def test_words_of_launcher_and_configuration_that_differ_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(UserError, match="asks for FSDP, the configuration says parallel ddp"):
        trainer(config(tmp_path, "--parallel", "ddp"))
    with pytest.raises(UserError, match="ema.device host has no use with parallel fsdp2"):
        trainer(config(tmp_path, "--ema.device", "host"))
