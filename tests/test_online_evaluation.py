"""Metrics of samples while a run trains, and what happens when they cannot be had."""

from __future__ import annotations

import json
import runpy
import signal
from pathlib import Path

import pytest
from helpers import ROOT, TINY, run_here

from sit_vit5.utils.errors import UserError

EVALUATED = {
    "reference": ["digits:held-out"], "features": ["pixels"], "every": [3], "num-samples": [70],
    "batch-size": [32], "steps": [2], "metrics": ["fid", "kid"],
}  # fmt: skip


def train(folder: Path, *argv: object, **changed: list[object]) -> int:
    """changed: options of the evaluation."""
    options = [*TINY, "--output-dir", folder, "--name", "run", *argv]
    for name, words in (EVALUATED | changed).items():
        options += [f"--evaluation.{name.replace('_', '-')}", *words]
    return runpy.run_path(str(ROOT / "train_sit.py"))["main"]([*map(str, options)])


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of six steps, evaluated twice."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert train(folder) == 0
    return folder / "run"


def test_values_are_those_of_the_evaluator_on_the_same_samples(trained, tmp_path):
    found = rows(trained)
    assert [(row["step"], row["weights"]) for row in found] == [(3, "ema_0.995"), (6, "ema_0.995")]
    out = tmp_path / "samples"
    run_here(
        "sample/generate.py", "--checkpoint", trained, "--num-samples", 70, "--out", out,
        "--method", "heun", "--steps", 2, "--guidance.scale", 1, "--batch-size", 32,
    )  # fmt: skip
    run_here(
        "evaluate/metrics.py", out / "samples.npz", "--reference", "digits:held-out",
        "--features", "pixels", "--metrics", "fid", "kid",
    )  # fmt: skip
    offline = json.loads((out / "metrics.json").read_text())
    online = found[-1]["values"]
    assert online["Frechet distance of pixels-70"] == pytest.approx(offline["frechet_distance"])
    assert online["Kernel distance of pixels-70"] == pytest.approx(offline["kernel_distance"])


def test_values_reach_the_page_and_a_resumed_run_has_no_row_twice(trained):
    page = (trained / "run.html").read_text()
    assert "Frechet distance of pixels-70 of samples of ema_0.995" in page
    assert "evaluation: step 6" not in page and "step 6, ema_0.995: Frechet" in page  # an event
    with (trained / "evaluations.jsonl").open("a") as file:
        file.write('{"step": 9, "weights": "ema_0.995", "values": {}}\n')
    main = runpy.run_path(str(ROOT / "train_sit.py"))["main"]
    assert main(["--resume", str(trained), "--steps", "9"]) == 0
    assert [row["step"] for row in rows(trained)] == [3, 6, 9]
    assert rows(trained)[-1]["values"]


def test_a_failed_evaluation_is_said_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    def broken(*_: object) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr("sit_vit5.evaluation.online.Generator.__call__", broken)
    assert train(tmp_path) == 0
    assert "warning: no evaluation at step 3: out of memory" in capsys.readouterr().out
    assert not (tmp_path / "run" / "evaluations.jsonl").exists()


def test_metrics_that_fail_are_said_in_one_line_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    def broken(*_: object) -> None:
        raise RuntimeError("no room\nfor a product")

    monkeypatch.setattr("sit_vit5.evaluation.online.Accumulator.compute", broken)
    assert train(tmp_path) == 0
    said = capsys.readouterr().out.splitlines()
    assert "warning: no evaluation at step 6: no room for a product" in said


def test_a_signal_breaks_an_evaluation_off(tmp_path, monkeypatch, capsys):
    from sit_vit5.sampling.generator import Generator

    call, drawn = Generator.__call__, []

    def interrupted(self, indices, labels):
        drawn.append(indices)
        signal.raise_signal(signal.SIGTERM)
        return call(self, indices, labels)

    monkeypatch.setattr("sit_vit5.evaluation.online.Generator.__call__", interrupted)
    assert train(tmp_path) == 128 + signal.SIGTERM
    assert len(drawn) == 1  # of three batches
    said = capsys.readouterr().out
    assert "no evaluation at step 3: broken off by a signal" in said
    assert "interrupted at step 3; saved" in said


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reference": ["absent.npz"]}, "absent.npz"),
        ({"metrics": ["fod"]}, "nearest: fid"),
        ({"metrics": ["is"]}, "needs logits features"),
        ({"features": ["inception"]}, "download .*--evaluation.feature-weights FILE"),
        ({"feature-weights": ["x.pth"]}, "--evaluation.feature-weights has no use with features"),
        ({"weights": ["ema_0.5"]}, "none of this run: raw, ema, ema_0.99"),
        ({"every": [0]}, "need each other"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_the_first_step(
    tmp_path, monkeypatch, changed, message
):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "no weights"))
    with pytest.raises(UserError, match=message):
        train(tmp_path, **changed)
    assert not (tmp_path / "run" / "latest").exists()
