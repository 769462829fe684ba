"""Paths that users give, and the order of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from sit_vit5.config import CheckpointConfig
from sit_vit5.models.checkpoint import prune_checkpoints
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.run_folder import (
    checkpoint_steps,
    find_checkpoint,
    has_latest,
    run_of,
    step_name,
)


def make(run: Path, *steps: int) -> None:
    for step in steps:
        folder = run / "checkpoints" / step_name(step)
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        (folder / "optimizer.safetensors").touch()


def test_checkpoints_are_kept_in_numeric_order(tmp_path):
    make(tmp_path, 9, 10, 100, 1000, 12_345_678)
    assert list(checkpoint_steps(tmp_path)) == [9, 10, 100, 1000, 12_345_678]
    prune_checkpoints(tmp_path, CheckpointConfig(keep=2), up_to=1000)
    assert list(checkpoint_steps(tmp_path)) == [100, 1000, 12_345_678]
    prune_checkpoints(tmp_path, CheckpointConfig(keep=0), up_to=12_345_678)
    assert len(checkpoint_steps(tmp_path)) == 3
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_a_milestone_outlives_a_change_of_the_interval(tmp_path):
    make(tmp_path, 10, 15, 20, 30)
    prune_checkpoints(tmp_path, CheckpointConfig(keep=1, milestone_every=10), up_to=30)
    assert list(checkpoint_steps(tmp_path)) == [10, 20, 30]
    make(tmp_path, 45)
    prune_checkpoints(tmp_path, CheckpointConfig(keep=1, milestone_every=15), up_to=45)
    assert list(checkpoint_steps(tmp_path)) == [10, 20, 30, 45]


def test_partial_checkpoints_are_neither_listed_nor_counted(tmp_path):
    make(tmp_path, 1)
    (tmp_path / "checkpoints" / "step_0000002.partial").mkdir()
    (tmp_path / "checkpoints" / "step_0000003").mkdir()
    assert list(checkpoint_steps(tmp_path)) == [1]


def test_run_folder_pointer_and_checkpoint_lead_to_the_same_place(tmp_path, monkeypatch):
    make(tmp_path, 5, 7)
    (tmp_path / "latest").write_text("checkpoints/step_0000005\n")
    folder = tmp_path / "checkpoints" / "step_0000005"
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "latest") == folder
    assert find_checkpoint(folder) == folder
    assert run_of(folder) == tmp_path
    monkeypatch.chdir(folder.parent)
    assert run_of(Path("step_0000005")) == tmp_path.resolve()
    assert run_of(tmp_path / "alone") == tmp_path / "alone"


def test_a_path_without_checkpoint_says_what_was_expected(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        find_checkpoint(tmp_path / "no")
    with pytest.raises(UserError, match=r"expected a folder with state.json"):
        find_checkpoint(tmp_path)
    make(tmp_path, 3)


def test_without_a_pointer_the_newest_complete_checkpoint_is_found(tmp_path):
    make(tmp_path, 3, 12)
    newest = tmp_path / "checkpoints" / "step_0000012"
    assert find_checkpoint(tmp_path) == newest
    (tmp_path / "latest").write_text("checkpoints/step_0000099\n")
    assert find_checkpoint(tmp_path / "latest") == newest
    assert not has_latest(tmp_path, 12) and not has_latest(tmp_path, 99)
    (tmp_path / "latest").write_text("checkpoints/step_0000003\n")
    assert has_latest(tmp_path, 3)
