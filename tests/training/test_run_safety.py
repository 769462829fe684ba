"""Nothing of a run is lost, repeated or overwritten: kills, refusals, disks, foreign folders."""

from __future__ import annotations

import errno
import hashlib
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import assert_equal, final_tensors
from test_trainer import config, poison, rows, trainer

from sit_vit5.codecs import build_codec
from sit_vit5.config.parse import parse_train
from sit_vit5.data import build_source
from sit_vit5.data.loader import StepLoader
from sit_vit5.models.checkpoint import open_checkpoint, save_checkpoint
from sit_vit5.training.logging import read_rows
from sit_vit5.training.trainer import Trainer
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import lock

SAVE = "sit_vit5.training.saver.save_checkpoint"


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of two steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[2])
        folder = tmp_path_factory.mktemp("runs")
        trainer(config(folder, "--steps", 2)).run()
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of it."""
    return shutil.copytree(trained, tmp_path / "run")


def content(folder: Path) -> dict[str, tuple[str, int]]:
    """Hash and time of every file."""
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Scores:
    """An evaluation whose value is its number of calls."""

    calls = 0

    def share(self, network, processes, stopped):
        self.calls += 1

    def values(self, shares):
        return {"calls": self.calls}


def evaluated(settings, scores=None, *, resume=None) -> Trainer:
    """A trainer that evaluates, and draws grids of one byte."""
    return Trainer(
        settings,
        build_source(settings.data),
        build_codec("identity", None),
        preview=lambda networks, path: path.write_text("a grid"),
        evaluation=scores or Scores(),
        resume=open_checkpoint(resume) if resume else None,
    )


EVALUATED = (
    "--evaluation.every", 2, "--evaluation.reference", "digits:held-out", "--preview.every", 2,
)  # fmt: skip


def killed_in(run: Trainer, method: str, step: int, copy: Path) -> Path:
    """Runs; what a kill would leave when a method of the trainer is called after a step."""
    original = getattr(run, method)

    def call(*arguments):
        if run.step == step and not copy.exists():
            run.saver.join()
            shutil.copytree(run.run_folder, copy)
        return original(*arguments)

    setattr(run, method, call)
    assert run.run() == 0
    return copy


def test_a_run_without_its_checkpoints_is_not_replaced(run):
    shutil.rmtree(run / "checkpoints")
    (run / "latest").unlink()
    before = content(run)
    with pytest.raises(
        UserError, match=r"but holds config.yaml, metrics.jsonl, .* move the folder"
    ):
        trainer(config(run.parent, "--steps", 1))
    assert content(run) == before


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml", "metrics.jsonl", "evaluations.jsonl", "run.html", "loss.png", "latest",
        "samples/step_0000002.png", "checkpoints/step_0000000/thesis.txt",
        "checkpoints/mine/thesis.txt", "ema_snapshots/step_0000001_width_0.1.safetensors",
    ],
)  # fmt: skip
def test_a_file_that_a_new_run_would_replace_is_refused(tmp_path, name):
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(UserError, match="no checkpoint to continue from, but holds .*--name, or m"):
        trainer(config(tmp_path, "--steps", 1))
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [file]


def test_a_folder_with_other_files_takes_a_new_run(tmp_path):
    (tmp_path / "run" / "samples").mkdir(parents=True)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "metrics.jsonl").touch()  # nothing in it
    assert trainer(config(tmp_path, "--steps", 1)).run() == 0
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_run_that_fails_before_its_first_checkpoint_starts_again(tmp_path, monkeypatch):
    def full(*arguments, **tensors):
        raise UserError("cannot save the checkpoint of step 0: no space")

    with monkeypatch.context() as patch:
        patch.setattr(SAVE, full)
        with pytest.raises(UserError, match="no space"):
            trainer(config(tmp_path, "--steps", 1, "--trackers", "tensorboard")).run()
    (tmp_path / "run" / "checkpoints" / "step_0000000.partial").mkdir(parents=True)  # and a kill
    assert trainer(config(tmp_path, "--steps", 1)).run() == 0


def test_a_folder_in_use_is_said_to_be_in_use(run):
    resumed = open_checkpoint(run)
    with lock(run, "training run"):
        for settings, resume in ((config(run.parent, "--steps", 1), None), (resumed.config, run)):
            settings = replace(settings, steps=1)  # refused for another reason too
            with pytest.raises(UserError, match="in use by another training run; wait for it"):
                trainer(settings, resume=resume)


def test_a_run_that_another_process_finished_meanwhile_is_not_replaced(tmp_path):
    settings = config(tmp_path, "--steps", 1)
    waiting = trainer(settings)
    trainer(settings).run()
    before = content(tmp_path / "run")
    with pytest.raises(UserError, match="holds another run, at step 1"):
        waiting.run()
    longer = replace(settings, steps=2)
    waiting = trainer(longer, resume=tmp_path / "run")
    trainer(longer, resume=tmp_path / "run").run()
    after = content(tmp_path / "run")
    with pytest.raises(UserError, match="not the newest checkpoint of its run"):
        waiting.run()
    assert content(tmp_path / "run") == after != before


def test_a_run_without_room_creates_no_folder(tmp_path, monkeypatch):
    def small(run, config, disk):
        raise UserError("no room")

    monkeypatch.setattr("sit_vit5.training.banner.check_disk", small)
    with pytest.raises(UserError, match="no room"):
        trainer(config(tmp_path, "--steps", 1)).run()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to the run folder .* another --output-dir"):
        trainer(config(tmp_path / "file", "--steps", 1)).run()


def test_a_resume_without_a_step_writes_nothing(run, capsys):
    before = content(run)
    argv = ["--resume", str(run), "--optimizer.lr", "7", "--batch-size", "7"]
    changed, checkpoint = parse_train(argv)
    assert trainer(changed, resume=checkpoint).run() == 0
    assert "step 2 of 2 is reached: nothing to do" in capsys.readouterr().out
    with pytest.raises(UserError, match="steps 1 is passed: the run is at step 2; give more"):
        trainer(replace(changed, steps=1), resume=checkpoint)
    assert content(run) == before


def test_a_resume_that_fails_before_a_step_keeps_the_configuration(run, monkeypatch):
    before = content(run)
    longer = replace(open_checkpoint(run).config, steps=4, batch_size=7)
    resumed = trainer(longer, resume=run)

    def no_memory(batches):
        raise RuntimeError("out of memory")

    resumed.steps.train = no_memory
    with pytest.raises(RuntimeError, match="out of memory"):
        resumed.run()
    after = content(run)
    for name in ("config.yaml", "metrics.jsonl", "latest"):
        assert after[str(run / name)] == before[str(run / name)]
    trainer(longer, resume=run).run()
    assert parse_train(["--resume", str(run)])[0].batch_size == 7


@pytest.mark.parametrize(
    ("method", "step"), [("_evaluate", 4), ("_draw", 4), ("_evaluate", 2), ("_draw", 2)]
)
def test_a_resume_makes_what_a_kill_after_the_checkpoint_left_out(tmp_path, method, step):
    settings = config(tmp_path, "--steps", 4, *EVALUATED)
    killed = killed_in(evaluated(settings), method, step, tmp_path / "killed" / "run")
    (killed / "loss.png.partial").write_text("half")
    assert open_checkpoint(killed).state.step == step
    scores = Scores()
    assert evaluated(settings, scores, resume=killed).run() == 0
    whole = tmp_path / "run"
    for run in (whole, killed):
        assert [row["step"] for row in read_rows(run / "evaluations.jsonl")] == [2, 4]
        assert [row["step"] for row in rows(run)] == [1, 2, 3, 4]
        assert sorted(path.name for path in (run / "samples").iterdir()) == [
            "step_0000002.png", "step_0000004.png",
        ]  # fmt: skip
        assert (run / "loss.png").is_file() and not list(run.rglob("*.partial"))
    assert_equal(final_tensors(whole), final_tensors(killed))
    before = content(killed)
    assert evaluated(settings, scores, resume=killed).run() == 0  # nothing is left to do
    assert content(killed) == before


def test_a_kill_before_the_last_figures_has_them_drawn(tmp_path):
    settings = config(tmp_path, "--steps", 2)
    killed = killed_in(trainer(settings), "_draw", 2, tmp_path / "killed" / "run")
    assert not (killed / "loss.png").exists()
    assert trainer(settings, resume=killed).run() == 0
    assert (killed / "loss.png").is_file()
    assert "finished" in (killed / "run.html").read_text()


def test_a_signal_in_the_last_evaluation_asks_for_a_resume(tmp_path, capsys):
    class Interrupted(Scores):
        def share(self, network, processes, stopped):
            signal.raise_signal(signal.SIGTERM)

    settings = config(tmp_path, "--steps", 2, *EVALUATED)
    assert evaluated(settings, Interrupted()).run() == 128 + signal.SIGTERM
    assert "interrupted at step 2; saved" in capsys.readouterr().out
    assert evaluated(settings, resume=tmp_path / "run").run() == 0
    assert [row["step"] for row in read_rows(tmp_path / "run" / "evaluations.jsonl")] == [2]


def broken_disk(run: Trainer, step: int) -> None:
    """The data cannot be read any more from a step on."""
    load = run.source.load

    def fail(index, *, mirror=False):
        if run.step >= step:
            raise OSError(errno.EIO, "Input/output error")
        return load(index, mirror=mirror)

    run.source.load = fail


def test_data_that_cannot_be_read_save_what_there_is(tmp_path):
    run = trainer(config(tmp_path, "--steps", 9, "--checkpoint.every", 0))
    broken_disk(run, 3)
    with pytest.raises(UserError, match="the data cannot be read: .*Input/output error"):
        run.run()
    assert open_checkpoint(tmp_path / "run").state.step == 3


def test_a_failure_whose_save_fails_tells_both(tmp_path, monkeypatch):
    def full(folder, state, *arguments, **tensors):
        if state.step:
            raise UserError("cannot save: no space")
        return save_checkpoint(folder, state, *arguments, **tensors)

    monkeypatch.setattr(SAVE, full)
    run = trainer(config(tmp_path, "--steps", 9, "--checkpoint.every", 0))
    broken_disk(run, 3)
    with pytest.raises(UserError, match="data cannot be read: .*; cannot save: no space"):
        run.run()


def test_a_save_that_failed_is_tried_again_before_the_run_ends(tmp_path, monkeypatch):
    failures = []

    def full_once(folder, state, *arguments, **tensors):
        if state.step and not failures:
            failures.append(state.step)
            raise UserError("cannot save: no space")
        return save_checkpoint(folder, state, *arguments, **tensors)

    monkeypatch.setattr(SAVE, full_once)
    with pytest.raises(UserError, match="cannot save: no space"):
        trainer(config(tmp_path, "--steps", 50, "--checkpoint.every", 2)).run()
    assert open_checkpoint(tmp_path / "run").state.step >= failures[0] == 2


def test_a_configuration_that_cannot_be_written_does_not_stop_a_run(tmp_path, monkeypatch, capsys):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sit_vit5.training.run.write_text", full)
    assert trainer(config(tmp_path, "--steps", 1)).run() == 0
    assert "config.yaml not written: [Errno 28]" in capsys.readouterr().out
    assert parse_train(["--resume", str(tmp_path / "run"), "--steps", "2"])[0].steps == 2


def test_a_step_of_bad_latents_names_them(tmp_path, monkeypatch, capsys):
    poison(monkeypatch, steps={3, 5})
    named = {3: ["c/shard_00001.bin, image 12"], 5: ["a", "b", "c", "d"]}
    monkeypatch.setattr(StepLoader, "not_finite", lambda self, step: named.get(step, []))
    trainer(config(tmp_path, "--steps", 7, name="skipped")).run()
    said = capsys.readouterr().out
    assert "warning: steps are skipped, since c/shard_00001.bin, image 12 is not finite; " in said
    assert "since a; b; c and 1 more are not finite; check the data with python -m sit_vit5" in said
    stopping = config(tmp_path, "--steps", 7, "--watchdog.on-nonfinite", "stop", name="stopped")
    with pytest.raises(UserError) as error:
        trainer(stopping).run()
    assert "gradient of step 4 is not finite, since c/shard_00001.bin, image 12 is" in str(
        error.value
    )
    assert "inspect" in str(error.value) and "optimizer.lr" not in str(error.value)


def test_bad_latents_that_cannot_be_named_are_skipped_still(tmp_path, monkeypatch):
    def gone(self, step):
        raise UserError("shard_00001.bin is missing")

    poison(monkeypatch, steps={1})
    monkeypatch.setattr(StepLoader, "not_finite", gone)
    assert trainer(config(tmp_path, "--steps", 3)).run() == 0
