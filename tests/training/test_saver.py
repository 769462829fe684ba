"""Saving while training goes on, milestones, and the disk that all of it takes."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import assert_equal, final_tensors
from test_trainer import config, trainer

from sit_vit5.config import CheckpointConfig, TrainConfig
from sit_vit5.models.checkpoint import open_checkpoint, save_checkpoint
from sit_vit5.training.disk import run_disk
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.run_folder import checkpoint_steps

SAVE = "sit_vit5.training.saver.save_checkpoint"


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    steps_while_writing, released = [], threading.Event()
    run = trainer(config(tmp_path, "--steps", 4, "--checkpoint.every", 2))

    def slow(folder, state, *arguments, **tensors):
        if state.step == 2:
            assert released.wait(timeout=30)  # until step 3 is done
            steps_while_writing.append(run.step)
        return save_checkpoint(folder, state, *arguments, **tensors)

    after_step = run._after_step

    def release() -> None:
        if run.step == 3:
            released.set()
        after_step()

    monkeypatch.setattr(SAVE, slow)
    run._after_step = release
    assert run.run() == 0
    assert steps_while_writing and steps_while_writing[0] >= 3
    monkeypatch.undo()
    waiting = config(tmp_path, "--steps", 2, "--checkpoint.background", False, name="waiting")
    trainer(waiting).run()
    second = tmp_path / "run" / "checkpoints" / "step_0000002"
    assert_equal(final_tensors(second), final_tensors(tmp_path / "waiting"))


@pytest.mark.parametrize("error", [UserError("disk full, said kindly"), RuntimeError("a bug")])
def test_a_failed_write_in_the_background_stops_the_run_with_its_reason(
    tmp_path, monkeypatch, error
):
    def fail(folder, state, *arguments, **tensors):
        if state.step >= 2:
            raise error
        return save_checkpoint(folder, state, *arguments, **tensors)

    monkeypatch.setattr(SAVE, fail)
    run = trainer(config(tmp_path, "--steps", 50, "--checkpoint.every", 2))
    with pytest.raises(UserError, match="disk full|a bug"):
        run.run()
    assert run.step < 50
    assert open_checkpoint(tmp_path / "run").state.step == 0


def test_of_milestones_the_averages_stay_and_are_sampled_not_resumed(tmp_path):
    argv = ("--steps", 9, "--checkpoint.every", 2, "--checkpoint.keep", 1)
    trainer(config(tmp_path, *argv, "--checkpoint.milestone-every", 3)).run()
    run = tmp_path / "run"
    assert list(checkpoint_steps(run)) == [3, 6, 9]
    files = {path.name for path in (run / "checkpoints" / "step_0000003").iterdir()}
    averages = {"ema_0.99.safetensors", "ema_0.995.safetensors"}
    assert files == averages | {"config.yaml", "state.json"}
    old = open_checkpoint(run / "checkpoints" / "step_0000003")
    assert old.denoiser("ema") is not None
    with pytest.raises(UserError, match="averages only, .*; resume the run folder"):
        trainer(old.config, resume=old.folder)
    last = open_checkpoint(run)
    assert last.resumable and last.state.step == 9


def test_disk_of_a_run_is_counted_from_its_intervals():
    checkpoint = CheckpointConfig(every=10, keep=2, milestone_every=25)
    ema = replace(TrainConfig().ema, decays=(0.9,), widths=(0.1,), snapshot_every=40)
    disk = run_disk(TrainConfig(steps=100, checkpoint=checkpoint, ema=ema), 1000, 600)
    assert disk.checkpoint == 4 * 3 * 1000 + 8 * 600
    assert disk.checkpoints == 3 * disk.checkpoint
    # Saved at 0, 10, 20, 25, 30 ... 75 ... 90, 100: the milestones 25, 50 and 75 are no more whole.
    assert disk.milestones == 3 * 2 * 4 * 1000
    assert disk.snapshots == 3 * 2 * 1000  # 40, 80 and the last
    assert disk.total == disk.checkpoints + disk.milestones + disk.snapshots


def test_a_disk_too_small_is_refused_before_the_first_step(tmp_path, monkeypatch, capsys):
    free = 10**6
    monkeypatch.setattr(
        "sit_vit5.utils.files.shutil.disk_usage", lambda path: SimpleNamespace(free=free)
    )
    with pytest.raises(UserError, match="the checkpoints of this run .* need .* free; free som"):
        trainer(config(tmp_path, "--steps", 40, "--checkpoint.keep", 9)).run()
    assert not (tmp_path / "run" / "latest").exists()
    free = 2 * 10**6
    trainer(config(tmp_path, "--steps", 2, "--checkpoint.keep", 1)).run()
    assert "for the newest 1 and the one being written; 2 MB are free" in capsys.readouterr().out
