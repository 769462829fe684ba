"""Trackers: what TensorBoard gets, and that none of them can stop a run."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from helpers import ROOT
from PIL import Image
from test_page import train

from sit_vit5.config import TrainConfig
from sit_vit5.config.parse import parse_train
from sit_vit5.training.logging import Trackers, check_trackers
from sit_vit5.utils.errors import UserError


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


class Fake(GeneralTracker):
    """Keeps what it is told; fails in the method named `fails`."""

    name, requires_logging_directory, fails = "fake", True, ""

    def __init__(self, project: str, folder: Path):
        super().__init__()
        self.project, self.folder, self.told = project, folder, []
        type(self).built = self
        self._tell("__init__")

    def _tell(self, method: str, *what: object) -> None:
        self.told.append((method, *what))
        if method == self.fails:
            raise RuntimeError("no key\nand no terminal")

    @property
    def tracker(self):
        return self

    def start(self):
        self._tell("start")

    def store_init_configuration(self, values):
        self._tell("config", values)

    def log(self, values, step=None):
        self._tell("log", values, step)

    def log_images(self, values, step=None):
        self._tell("images", values, step)

    def finish(self):
        self._tell("finish")


@pytest.fixture
def fake(monkeypatch):
    class Own(Fake):
        pass

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "fake", Own)
    return Own


def test_a_tracker_gets_configuration_rows_and_grids(tmp_path, fake):
    run = train(tmp_path, "--trackers", "fake", "--steps", 3, "--preview.every", 2)
    told = fake.built.told
    assert [entry[0] for entry in told] == [
        "__init__", "start", "config", "log", "log", "images", "log", "images", "finish",
    ]  # fmt: skip
    assert told[2][1]["optimizer.lr"] == 0.002 and told[2][1]["ema.decays"] == "[0.99, 0.995]"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [entry[1] | {"step": entry[2]} for entry in told if entry[0] == "log"]
    assert logged == [{k: v for k, v in row.items() if k != "unix_time"} for row in rows]
    assert told[5][1]["samples"].shape == (1, 8, 8, 3)


@pytest.mark.parametrize("method", ["__init__", "start", "config", "log", "images", "finish"])
def test_a_failing_tracker_is_dropped_with_one_line(tmp_path, fake, capsys, method):
    fake.fails = method
    run = train(tmp_path, "--trackers", "fake", "--preview.every", 2)
    said = capsys.readouterr().out
    assert said.count("warning: tracker fake could not") == 1
    assert "is off: no key and no terminal" in said
    assert fake.built.told[-1][0] == method  # nothing more was asked of it
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_tracker_that_is_not_installed_is_one_note(tmp_path, fake, capsys, monkeypatch):
    def absent(self):
        raise ModuleNotFoundError("No module named 'fakeboard'", name="fakeboard")

    monkeypatch.setattr(fake, "start", absent)
    train(tmp_path, "--trackers", "fake", "--steps", 1)
    said = capsys.readouterr().out
    assert said.count("note: tracker fake is off, its package fakeboard is not installed") == 1


def test_a_tracker_cannot_ask_and_wait(tmp_path, fake, capsys, monkeypatch):
    keyboard = io.StringIO("an answer")
    monkeypatch.setattr(sys, "stdin", keyboard)
    monkeypatch.setattr(fake, "start", lambda self: input("key? "))
    train(tmp_path, "--trackers", "fake", "--steps", 1)
    assert "tracker fake could not start and is off: EOF" in capsys.readouterr().out
    assert sys.stdin is keyboard and keyboard.read() == "an answer"


def test_unknown_trackers_are_refused_with_the_nearest(tmp_path):
    with pytest.raises(UserError, match=r"unknown trackers 'tensorbord'; nearest: tensorboard"):
        check_trackers(("tensorbord",))
    with pytest.raises(UserError, match="nearest: wandb"):
        train(tmp_path, "--trackers", "wanb")
    assert not (tmp_path / "tiny").exists()


def test_the_default_is_tensorboard_and_an_empty_list_is_none():
    assert TrainConfig().trackers == ("tensorboard",)
    assert parse_train(["--trackers"])[0].trackers == ()
    assert parse_train(["--trackers", "wandb", "trackio"])[0].trackers == ("wandb", "trackio")


def test_a_resumed_tensorboard_log_has_every_step_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    PartialState()
    config = replace(TrainConfig(), trackers=("tensorboard",))
    Image.new("RGB", (8, 6), "red").save(tmp_path / "grid.png")
    for first_step, steps in ((0, [1, 2, 3, 4]), (2, [3, 4, 5])):
        trackers = Trackers(tmp_path, config, first_step=first_step, say=pytest.fail)
        for step in steps:
            trackers.log({"step": step, "loss": step + first_step, "grad_norm": None})
        trackers.grid(tmp_path / "grid.png", steps[-1])
        trackers.finish()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(s.step, s.value) for s in found.Scalars("loss")] == [
        (1, 1), (2, 2), (3, 5), (4, 6), (5, 7),
    ]  # fmt: skip
    assert [(i.step, i.width, i.height) for i in found.Images("samples")] == [(5, 8, 6)]
    assert found.Tags()["scalars"] == ["loss"]
    assert found.Tags()["tensors"] == ["config/text_summary"]
