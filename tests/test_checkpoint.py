"""Checkpoint folders: whole or absent, and clear about what is wrong with them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import TINY

from sit_vit5 import checkpoint as module
from sit_vit5.checkpoint import State, open_checkpoint, save_checkpoint
from sit_vit5.cli import parse_train
from sit_vit5.config import CheckpointConfig, TrainConfig
from sit_vit5.errors import UserError
from sit_vit5.models.denoiser import Denoiser


@pytest.fixture
def config(monkeypatch) -> TrainConfig:
    monkeypatch.chdir(Path(__file__).parents[1])
    return parse_train(list(TINY))[0]


def state(step: int) -> State:
    return State(
        step=step,
        images_seen=step * 16,
        skipped_steps=0,
        skipped_in_a_row=0,
        in_channels=1,
        input_size=(8, 8),
        class_names=("a", "b"),
        data={"source": "test"},
        codec={"name": "identity"},
    )


def save(run: Path, config: TrainConfig, step: int) -> Path:
    model = Denoiser(config.backbone, in_channels=1, input_size=(8, 8), num_classes=2)
    weights = model.state_dict()
    return save_checkpoint(
        run,
        state(step),
        config,
        model=weights,
        averages={f"ema_{d}": {k: t + d for k, t in weights.items()} for d in (0.99, 0.995)},
        optimizer={},
    )


def test_a_checkpoint_reads_back_equal_and_needs_nothing_else(tmp_path, config):
    folder = save(tmp_path / "run", config, 3)
    shutil.move(folder, tmp_path / "alone")
    found = open_checkpoint(tmp_path / "alone")
    assert (found.config, found.state) == (config, state(3))
    raw = found.denoiser("raw").state_dict()
    for name, shift in (("ema", 0.995), ("ema_0.99", 0.99), ("ema_0.995", 0.995)):
        average = found.denoiser(name).state_dict()
        assert all(torch.equal(average[key], raw[key] + shift) for key in raw)


def test_a_checkpoint_from_before_origins_were_recorded_is_read(tmp_path, config):
    file = save(tmp_path, config, 1) / "state.json"
    old = json.loads(file.read_text())
    assert old.pop("codec_origin") == {}
    file.write_text(json.dumps(old))
    assert open_checkpoint(tmp_path / "latest").state == state(1)


def test_unknown_weights_are_refused_with_the_existing_ones(tmp_path, config):
    found = open_checkpoint(save(tmp_path, config, 1))
    with pytest.raises(
        UserError, match="which has raw, ema_0.99, ema_0.995; choose one with --weights"
    ):
        found.weights("ema_0.9")


def test_latest_names_the_newest_complete_checkpoint(tmp_path, config):
    for step in (9, 10):
        save(tmp_path, config, step)
        assert open_checkpoint(tmp_path / "latest").state.step == step


@pytest.mark.parametrize("failing", ["model", "optimizer", "config.yaml", "state.json", "latest"])
def test_a_failed_save_leaves_the_previous_checkpoint(tmp_path, config, monkeypatch, failing):
    error = OSError(28, "No space left on device")
    save(tmp_path, config, 1)
    write_tensors, write_text = module.write_tensors, module.write_text

    def failing_write_tensors(path, tensors):
        if path.stem == failing:
            raise error
        write_tensors(path, tensors)

    def failing_write_text(path, text):
        if path.name == failing:
            raise error
        write_text(path, text)

    monkeypatch.setattr(module, "write_tensors", failing_write_tensors)
    monkeypatch.setattr(module, "write_text", failing_write_text)
    monkeypatch.setattr("sit_vit5.files.write_text", failing_write_text)
    with pytest.raises(UserError, match=r"cannot save the checkpoint of step 2: .*--resume") as e:
        save(tmp_path, config, 2)
    assert "\n" not in str(e.value)
    monkeypatch.undo()
    assert open_checkpoint(tmp_path).state.step == 1
    assert not list(tmp_path.rglob("*.partial"))
    save(tmp_path, config, 2)
    assert open_checkpoint(tmp_path).state.step == 2


def test_a_kill_at_any_point_of_a_second_save_leaves_a_complete_latest(
    tmp_path, config, monkeypatch
):
    class Killed(BaseException):
        pass

    import os
    import shutil as shell

    calls = []

    def dying(function, at: int):
        def wrapped(*arguments, **options):
            calls.append(function)
            if len(calls) == at:
                raise Killed
            return function(*arguments, **options)

        return wrapped

    for at in range(1, 40):
        run = tmp_path / str(at)
        save(run, config, 1)
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(module.os, "replace", dying(os.replace, at))
            patch.setattr(module.shutil, "rmtree", dying(shell.rmtree, at))
            patch.setattr(module, "write_tensors", dying(module.write_tensors, at))
            try:
                save(run, config, 2)
                module.prune_checkpoints(run, CheckpointConfig(keep=1), up_to=2)
            except Killed:
                assert open_checkpoint(run).state.step in (1, 2)
                assert open_checkpoint(run).weights("ema")
                save(run, config, 2)
                assert open_checkpoint(run).state.step == 2
                continue
        break
    assert at > 8  # the loop went past the last call, having died at each of them


def test_a_leftover_folder_of_the_same_step_is_replaced(tmp_path, config):
    save(tmp_path, config, 1)
    save(tmp_path, config, 2)
    (tmp_path / "latest").write_text("checkpoints/step_0000001\n")  # killed before the pointer
    (tmp_path / "checkpoints" / "step_0000003.partial").mkdir()
    (tmp_path / "checkpoints" / "step_0000001.mine").mkdir()
    save(tmp_path, config, 2)
    assert (tmp_path / "checkpoints" / "step_0000001.mine").is_dir()
    assert not (tmp_path / "checkpoints" / "step_0000003.partial").exists()
    assert open_checkpoint(tmp_path).state.step == 2


def test_broken_checkpoints_are_refused_in_one_line(tmp_path, config):
    def broken(name: str, breakage) -> Path:
        folder = tmp_path / name
        shutil.copytree(save(tmp_path / "run", config, 1), folder)
        breakage(folder)
        return folder

    def edit_state(**changes):
        def edit(folder: Path) -> None:
            path = folder / "state.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))

        return edit

    def truncate(folder: Path) -> None:
        path = folder / "ema_0.99.safetensors"
        path.write_bytes(path.read_bytes()[:-100])

    cases = {
        "schema": (edit_state(schema=99), "checkpoint schema 99, this version reads 1"),
        "field": (edit_state(extra=1), "not a checkpoint's state"),
        "count": (edit_state(step="3"), "step '3' is not a count"),
        "size": (edit_state(input_size=[8]), "input_size"),
        "names": (edit_state(class_names=[1, 2]), "class_names is not a list of names"),
        "json": (lambda f: (f / "state.json").write_text("{"), "cannot be read"),
        "list": (lambda f: (f / "state.json").write_text("[]"), "schema None"),
        "cut": (truncate, "ema_0.99.safetensors cannot be read: .* use another checkpoint"),
        "gone": (
            lambda f: (f / "model.safetensors").unlink(),
            "weights 'raw' are not in .* which has ema_0.99, ema_0.995",
        ),
        "config": (lambda f: (f / "config.yaml").write_text("stepz: 1"), "unknown option stepz"),
    }
    for name, (breakage, message) in cases.items():
        with pytest.raises(UserError, match=message) as error:
            found = open_checkpoint(broken(name, breakage))
            for weights in ("raw", "ema_0.99", "ema_0.995"):
                found.weights(weights)
        assert "\n" not in str(error.value)


def test_weights_of_another_shape_are_refused_by_name(tmp_path, config):
    found = open_checkpoint(save(tmp_path, config, 1))
    wider = replace(config.backbone, width=32)
    with pytest.raises(UserError, match="do not fit the model"):
        replace(found, config=replace(config, backbone=wider)).denoiser("raw")
