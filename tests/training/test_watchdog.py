"""Faults of every kind, injected: what is skipped, said, rewound, stopped."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import ROOT, assert_equal, command_environment, final_tensors
from test_trainer import config, poison, rows, trainer

from sit_vit5.config import WatchdogConfig
from sit_vit5.models.checkpoint import open_checkpoint
from sit_vit5.training import flow_matching as objective
from sit_vit5.training.watchdog import ENOUGH, HISTORY, Watchdog
from sit_vit5.utils.errors import UserError


def watchdog(**options) -> Watchdog:
    return Watchdog(2, WatchdogConfig(**options))


def spikes(monkeypatch, steps: set[int], factor: float = 1e6) -> None:
    """Makes the loss of some data steps huge, as a bad image would."""
    original = objective.Objective.loss

    def loss(self, model, latents, labels, *, step, micro):
        losses = original(self, model, latents, labels, step=step, micro=micro)
        return losses * factor if step in steps else losses

    monkeypatch.setattr(objective.Objective, "loss", loss)


def test_skipped_steps_are_counted_and_too_many_in_a_row_stop(tmp_path):
    dog = watchdog()
    norms = (1.0, float("nan"), 2.0, float("inf"))
    assert [dog.accepts(step, norm) for step, norm in enumerate(norms)] == [
        True, False, True, False,
    ]  # fmt: skip
    dog.check(4, tmp_path)
    assert (dog.skipped, dog.in_a_row) == (2, 1)
    dog.accepts(4, float("nan"))
    with pytest.raises(UserError, match="too large 2 steps in a row.*last good checkpoint: none"):
        dog.check(5, tmp_path)


def test_a_spike_is_told_against_the_median_of_enough_good_steps():
    dog = watchdog(spike=10, on_spike="skip")
    assert dog.limit() == math.inf
    for step in range(ENOUGH):
        assert dog.accepts(step, 100.0 if step == 3 else 1.0 + step / ENOUGH)
    assert 15 < dog.limit() < 16  # ten times the median of 1 to 2; one large norm does not move it
    assert not dog.accepts(50, 20.0) and dog.accepts(51, 9.0)
    assert dog.skipped == 1 and 20.0 not in dog.norms
    (said,) = dog.report()
    assert "1 gradient norms were over 10 times their median, the last 20 at step 51" in said
    assert dog.report() == []
    for step in range(300):
        dog.accepts(step, 5.0)
    assert len(dog.norms) == HISTORY
    logging = watchdog(spike=10, on_spike="log")
    logging.norms = [1.0] * ENOUGH
    assert (
        logging.limit() == math.inf
        and logging.accepts(0, 50.0)
        and "only noted" in logging.report()[0]
    )
    assert watchdog(spike=0, on_spike="skip").limit() == math.inf


def test_a_gradient_of_exactly_zero_stops_after_the_limit(tmp_path):
    dog = watchdog()
    for step, norm in enumerate((0.0, 1.0, 0.0)):
        assert dog.accepts(step, norm)
        dog.check(step + 1, tmp_path)
    dog.accepts(3, 0.0)
    with pytest.raises(UserError, match="exactly zero 2 steps in a row, up to step 4"):
        dog.check(4, tmp_path)


def test_a_good_step_asks_nothing_of_the_disk(tmp_path, monkeypatch):
    def asked(run):
        raise AssertionError("at every step")

    monkeypatch.setattr("sit_vit5.training.watchdog.last_good_checkpoint", asked)
    dog = watchdog()
    for step in range(3):
        assert dog.accepts(step, 1.0)
        dog.check(step + 1, tmp_path)


def test_a_spike_that_stops_the_run_did_change_the_weights(tmp_path):
    dog = watchdog(spike=10, on_spike="stop")
    dog.norms = [1.0] * ENOUGH
    assert dog.accepts(7, 50.0) and "only noted" in dog.report()[0]
    with pytest.raises(UserError, match="norm 50 of step 8 is over 10 times .*last good"):
        dog.check(8, tmp_path)


def test_a_run_whose_gradient_vanishes_stops(tmp_path, monkeypatch):
    spikes(monkeypatch, set(range(3, 50)), factor=0.0)
    with pytest.raises(UserError, match="exactly zero 4 steps in a row, up to step"):
        trainer(config(tmp_path, "--steps", 20, "--max-skipped", 4)).run()


def test_a_spike_that_is_skipped_leaves_the_weights_as_they_were(tmp_path, monkeypatch, capsys):
    settings = config(
        tmp_path, "--steps", ENOUGH + 4, "--watchdog.on-spike", "skip", "--checkpoint.every", 0
    )
    spikes(monkeypatch, {ENOUGH + 1})
    run = trainer(settings)
    updated = []
    average = run.learner.average
    run.learner.average = lambda step: (updated.append(step), average(step))
    run.run()
    assert ENOUGH + 1 not in updated and len(updated) == ENOUGH + 3
    assert open_checkpoint(tmp_path / "run").state.skipped_steps == 1
    assert "gradient norms were over 10 times their median" in capsys.readouterr().out
    assert rows(tmp_path / "run")[-1]["skipped_steps"] == 1


def test_what_counts_as_a_spike_survives_a_resume(tmp_path, monkeypatch):
    spikes(monkeypatch, {ENOUGH + 5})
    options = ("--watchdog.on-spike", "skip", "--checkpoint.every", ENOUGH + 2)
    trainer(config(tmp_path, "--steps", ENOUGH + 8, *options, name="straight")).run()
    trainer(config(tmp_path, "--steps", ENOUGH + 2, *options, name="halted")).run()
    halted = tmp_path / "halted"
    longer = replace(open_checkpoint(halted).config, steps=ENOUGH + 8)
    trainer(longer, resume=halted).run()
    assert open_checkpoint(halted).state.skipped_steps == 1
    assert_equal(final_tensors(tmp_path / "straight"), final_tensors(halted))


@pytest.mark.parametrize("kind", ["nonfinite", "spike"])
def test_a_rewind_goes_back_to_the_checkpoint_and_past_the_data(
    tmp_path, monkeypatch, kind, capsys
):
    bad = ENOUGH + 3
    if kind == "nonfinite":
        poison(monkeypatch, steps={bad})
    else:
        spikes(monkeypatch, {bad})
    settings = config(
        tmp_path, "--steps", bad + 4, f"--watchdog.on-{kind}", "rewind", "--checkpoint.every", 5,
        "--checkpoint.keep", 0,
    )  # fmt: skip
    run = trainer(settings)
    assert run.run() == 0
    said = capsys.readouterr().out
    assert "back to step 35, and past the data up to step 36 (rewind 1 of 3)" in said
    state = open_checkpoint(tmp_path / "run").state
    assert (state.step, state.data_offset, state.rewinds) == (bad + 4, 1, 1)
    steps = [row["step"] for row in rows(tmp_path / "run")]
    assert steps == list(range(1, bad + 5))  # none twice
    # The rest is what a run would do that starts at the checkpoint with these data.
    monkeypatch.undo()
    again = trainer(settings_of(settings, "again"))
    again.steps.restore(open_checkpoint(tmp_path / "run" / "checkpoints" / "step_0000035"))
    again.steps.data_offset = 1
    again.run()
    assert_equal(final_tensors(tmp_path / "run"), final_tensors(tmp_path / "again"))


def settings_of(settings, name: str):
    return replace(settings, name=name)


def test_rewinds_come_to_an_end_and_stop_means_stop(tmp_path, monkeypatch):
    poison(monkeypatch, steps=set(range(3, 100)))
    rewinding = config(
        tmp_path, "--steps", 9, "--watchdog.on-nonfinite", "rewind", "--watchdog.max-rewinds", 2
    )
    with pytest.raises(UserError, match="not finite, after 2 rewinds; last good checkpoint"):
        trainer(rewinding).run()
    stopping = config(tmp_path, "--steps", 9, "--watchdog.on-nonfinite", "stop", name="stop")
    with pytest.raises(UserError, match="gradient of step 4 is not finite; last good checkpoint"):
        trainer(stopping).run()
    assert open_checkpoint(tmp_path / "stop").state.step <= 4


def test_an_average_that_does_not_move_is_said(tmp_path, capsys):
    run = trainer(config(tmp_path, "--steps", 4))
    run.learner.ema.update = lambda model, step: None
    run.run()
    assert "warning: the average ema_0.99 has not moved" in capsys.readouterr().out
    whole = trainer(config(tmp_path, "--steps", 4, name="whole"))
    whole.run()
    assert "has not moved" not in capsys.readouterr().out


def test_time_lost_to_data_is_logged_and_said(tmp_path, capsys):
    import time

    settings = config(tmp_path, "--steps", 3, "--watchdog.data-wait", 0.5)
    run = trainer(settings)
    load = run.source.load
    run.source.load = lambda index, mirror: (time.sleep(0.02), load(index, mirror=mirror))[1]
    run.run()
    assert rows(tmp_path / "run")[-1]["data_wait"] > 0.5
    assert "of the time went on waiting for data; raise --data.workers" in capsys.readouterr().out


STUCK = """
import sys, time
from datetime import timedelta
from sit_vit5.utils.distributed import HostSync, join_processes
from sit_vit5.utils.errors import UserError

processes = join_processes(minutes=0.05)
words = HostSync(processes.count, timedelta(seconds=3), roll_call=timedelta(seconds=2))
assert words.largest(processes.rank) == processes.count - 1
if processes.rank == 1:
    time.sleep(12)
try:
    with words.kept_together():
        processes.wait() if processes.rank == 2 else words.largest(0)
except UserError as error:
    print(f"rank {processes.rank}: {error}", flush=True)
"""


def test_a_stuck_process_is_named_by_the_others(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    shown = subprocess.run(
        [*launcher, str(script)],
        cwd=ROOT, env=command_environment(), capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    (said,) = [line for line in shown.stdout.splitlines() if line.startswith("rank 0")]
    assert "no answer from rank 1; a process is stuck or dead" in said, shown.stdout
    # Patience is also that of gradients, on their way through the other group.
    (said,) = [line for line in shown.stdout.splitlines() if line.startswith("rank 2")]
    assert "the processes have lost one another" in said


def test_the_watchdogs_state_is_plain_json(tmp_path):
    trainer(config(tmp_path, "--steps", 3)).run()
    state = json.loads(next((tmp_path / "run" / "checkpoints").glob("*3/state.json")).read_text())
    assert len(state["grad_norms"]) == 3 and state["data_offset"] == 0
    assert torch.tensor(state["grad_norms"]).isfinite().all()
