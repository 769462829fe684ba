"""Checkpoint folders: whole or absent, and clear about what is wrong with them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import TINY
from safetensors.torch import load_file, save_file

from sit_vit5.config import CheckpointConfig, TrainConfig
from sit_vit5.config.parse import parse_train
from sit_vit5.models import checkpoint as module
from sit_vit5.models.checkpoint import State, open_checkpoint, save_checkpoint
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.utils.errors import UserError


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
    with pytest.raises(UserError, match="which has raw, ema_0.99, ema_0.995; choose one of these"):
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
    monkeypatch.setattr("sit_vit5.utils.files.write_text", failing_write_text)
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
        "field": (edit_state(extra=1), "state.json cannot be read: extra: Unexpected"),
        "count": (
            edit_state(step="3"),
            "step: Input should be a valid integer",
        ),
        "size": (edit_state(input_size=[8]), "input_size"),
        "names": (edit_state(class_names=[1, 2]), "class_names.0: Input should be a valid string"),
        "json": (lambda f: (f / "state.json").write_text("{"), "cannot be read"),
        "list": (lambda f: (f / "state.json").write_text("[]"), "should be an object"),
        "cut": (truncate, "ema_0.99.safetensors cannot be read: .*; no other checkpoint"),
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("out_channels", value) for value in (-1, 0, "x", 1.5)],
        *[("timesteps", value) for value in ("x", -1, None)],
        *[("data_offset", value) for value in (None, "x", 1.5, 10**30, True)],
        *[("in_channels", value) for value in (10**30, 0, None)],
        *[("input_size", value) for value in ([10**9, 8], [8, -8], [8, 8, 8], 8, {})],
        *[("rewinds", value) for value in (None, [])],
        *[("grad_norms", value) for value in (["x"], 1, [None])],
        *[(name, 5) for name in ("data", "codec", "codec_origin", "versions", "class_names")],
        ("class_names", ["\ud800"]),
    ],
)
def test_every_field_of_the_state_is_checked(tmp_path, config, field, value):
    file = save(tmp_path, config, 1) / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(
        UserError, match=f"state.json cannot be read: .*{field}|hex escape"
    ) as error:
        open_checkpoint(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", ["", "[" * 100_000, "\xff", "NaN"])
def test_damage_names_another_checkpoint_of_the_run(tmp_path, config, damage):
    older, newer = save(tmp_path, config, 1), save(tmp_path, config, 2)
    (newer / "state.json").write_bytes(damage.encode("latin-1"))
    with pytest.raises(
        UserError, match=f"such as {older} .to resume from it, first remove {newer}"
    ):
        open_checkpoint(tmp_path)
    shutil.rmtree(newer)
    assert open_checkpoint(tmp_path).folder == older


def test_weights_that_are_not_finite_name_another_checkpoint(tmp_path, config):
    older, newer = save(tmp_path, config, 1), save(tmp_path, config, 2)
    weights = load_file(newer / "model.safetensors")
    weights["final.bias"][0] = float("nan")
    save_file(weights, newer / "model.safetensors")
    with pytest.raises(UserError, match=f"final.bias is not finite; use .* such as {older}"):
        open_checkpoint(tmp_path).denoiser("raw")
    open_checkpoint(tmp_path).denoiser("ema")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.complex64])
def test_weights_of_another_type_are_refused(tmp_path, config, dtype):
    folder = save(tmp_path, config, 1)
    weights = load_file(folder / "model.safetensors")
    save_file({k: t.to(dtype) for k, t in weights.items()}, folder / "model.safetensors")
    with pytest.raises(UserError, match="and .* more are .*, not float32; no other checkpoint"):
        open_checkpoint(folder).weights("raw")


def test_a_resume_without_all_files_names_what_is_missing(tmp_path, config):
    save(tmp_path, config, 1)
    found = open_checkpoint(save(tmp_path, config, 2))
    found.check_resumable()
    (found.folder / "model.safetensors").unlink()
    (found.folder / "ema_0.99.safetensors").unlink()
    with pytest.raises(UserError, match="lacks model.safetensors, ema_0.99.safetensors; use ano"):
        found.check_resumable()


def test_weights_of_another_shape_are_refused_by_name(tmp_path, config):
    found = open_checkpoint(save(tmp_path, config, 1))
    wider = replace(config.backbone, width=32)
    with pytest.raises(UserError, match="do not fit the model"):
        replace(found, config=replace(config, backbone=wider)).denoiser("raw")
