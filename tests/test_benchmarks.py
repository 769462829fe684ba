"""Benchmarks still fit the code that they measure."""

from __future__ import annotations

import sys

import pytest
from helpers import ROOT


@pytest.fixture
def benchmarks(monkeypatch):
    """benchmarks/ as their scripts see it; its modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


def test_the_training_benchmark_times_steps_of_the_trainer_and_of_plain_code(benchmarks, tmp_path):
    import data
    import plain_sit
    import training

    cache = data.write_cache(tmp_path / "cache", 300)
    assert len(cache) == 300 and cache.item_shape == (4, 32, 32)
    run = training.trainer("ViT5-Nano/4", "fp32", "eager", tmp_path, 2)
    clock = training.Clock(run, "cpu")
    for _ in range(4):
        clock.step()
    clock.close()
    assert run.step == 4 and 0 < clock.outside() < 1
    assert run.learner.optimizers[0].state and run.steps._unsettled is None
    plain_sit.WIDTH, plain_sit.DEPTH, plain_sit.HEADS = 32, 1, 2
    plain_sit.plain_step(2, "fp32", "cpu")()


def test_the_evaluation_benchmark_runs_every_part(benchmarks, monkeypatch, capsys):
    import evaluation
    import frechet

    monkeypatch.setattr(frechet, "WIDTH", 16)
    monkeypatch.setattr(frechet, "ZERO", frechet.np.zeros(16))
    # Its eigenvalues of 2,048 dimensions take seconds: tests/evaluation compares with it once.
    theirs = {"frechet_inception_distance": 1.0}
    monkeypatch.setattr(evaluation.torch_fidelity, "calculate_metrics", lambda **options: theirs)
    tiny = ["--images", "4", "--side", "8", "--samples", "9", "--reference", "8"]
    monkeypatch.setattr(sys, "argv", ["evaluation.py", *tiny])
    evaluation.main()
    shown = capsys.readouterr().out
    assert "peak memory" in shown and shown.count("ratio") == 3
    assert "from the kept features" in shown
