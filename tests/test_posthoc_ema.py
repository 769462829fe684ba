"""Averages of widths: in training, across a resume, and made of snapshots by the command."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import TINY, assert_equal, final_tensors, run_here
from safetensors.torch import load_file, save_file

from sit_vit5.codecs import build_codec
from sit_vit5.config import EmaConfig, PosthocEmaConfig, TrainConfig
from sit_vit5.config.parse import parse_train
from sit_vit5.data import build_source
from sit_vit5.models.checkpoint import open_checkpoint
from sit_vit5.training.banner import banner
from sit_vit5.training.disk import run_disk
from sit_vit5.training.snapshots import DTYPE, find_snapshots, write_snapshots
from sit_vit5.training.trainer import Trainer
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.power_ema import Profile

OPTIONS = ("--steps", 42, "--checkpoint.every", 10, "--ema.snapshot-every", 4)
COMMAND = "posthoc-ema"


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])


def trainer(
    folder: Path, *argv: object, resume: Path | None = None, plain: bool = False
) -> Trainer:
    arguments = [*TINY, *([] if plain else OPTIONS), "--output-dir", folder, *argv]
    config = parse_train([str(argument) for argument in arguments])[0]
    return Trainer(
        config,
        build_source(config.data),
        build_codec(config.codec.name, config.codec.path),
        preview=None,
        resume=open_checkpoint(resume) if resume else None,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run that tracks, beside the widths it would, the one that the command is asked for."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[1])
        trainer(folder, "--ema.widths", 0.05, 0.1, 0.08).run()
    return folder / "tiny"


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """The run without the snapshots of that width."""
    run = tmp_path / "tiny"
    shutil.copytree(trained, run)
    for path in (run / "ema_snapshots").glob("*_0.08.safetensors"):
        path.unlink()
    return run


def test_snapshots_are_written_at_every_interval_and_at_the_end(trained):
    stored = find_snapshots(trained)
    assert sorted({profile.step for profile in stored}) == [*range(4, 41, 4), 42]
    assert {profile.width for profile in stored} == {0.05, 0.08, 0.1}
    last = load_file(stored[Profile(42, 0.1)])
    average = open_checkpoint(trained).weights("ema_width_0.1")
    assert_equal(last, {name: tensor.to(DTYPE) for name, tensor in average.items()})
    config = open_checkpoint(trained).config
    sizes = sum(path.stat().st_size for path in stored.values())
    parameters = sum(tensor.numel() for tensor in average.values())
    assert run_disk(config, parameters, 0).snapshots == pytest.approx(sizes, rel=0.3)  # headers


def test_a_resumed_run_writes_the_same_averages_and_snapshots_to_the_bit(trained, tmp_path):
    cut = trainer(tmp_path, "--ema.widths", 0.05, 0.1, 0.08)
    after_step = cut._after_step

    def interrupt_after() -> None:
        after_step()
        if cut.step == 27:
            signal.raise_signal(signal.SIGTERM)

    cut._after_step = interrupt_after
    cut.run()
    run = tmp_path / "tiny"
    shutil.rmtree(run / "checkpoints" / "step_0000027")  # as a kill after step 24 leaves it
    newer = [path for profile, path in find_snapshots(run).items() if profile.step > 20]
    assert [path.name[:12] for path in newer] == ["step_0000024"] * 3
    for path in newer:
        path.write_bytes(b"")
    (run / "latest").write_text("checkpoints/step_0000020\n")
    trainer(tmp_path, "--ema.widths", 0.05, 0.1, 0.08, resume=run).run()
    assert_equal(final_tensors(trained), final_tensors(run))
    whole, resumed = find_snapshots(trained), find_snapshots(run)
    assert list(whole) == list(resumed)
    for profile, path in whole.items():
        assert path.read_bytes() == resumed[profile].read_bytes(), profile


def test_the_command_makes_the_average_that_was_tracked(run, trained, tmp_path, capsys):
    run_here(COMMAND, "--run", run, "--width", 0.08, "--to", tmp_path / "made")
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == str(tmp_path / "made") and "matched to" in shown[0]
    checkpoint = open_checkpoint(tmp_path / "made")
    made, tracked = checkpoint.weights("ema"), open_checkpoint(trained).weights("ema_width_0.08")
    near = open_checkpoint(trained).weights("ema_width_0.1")

    def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.flatten() for tensor in weights.values()])

    error, other = ((flat(w) - flat(tracked)).norm() for w in (made, near))
    assert flat(made).dtype == torch.float32
    assert error < 0.05 * other and error < 5e-4 * flat(tracked).norm()
    assert checkpoint.weights_name("ema") == "ema_width_0.08"
    assert checkpoint.state.step == 42 and checkpoint.state.images_seen == 42 * 16


def test_what_the_command_writes_is_sampled_like_any_checkpoint(run, tmp_path):
    made = tmp_path / "made"
    run_here(COMMAND, "--run", run / "latest", "--width", 0.12, "--step", 40, "--to", made)
    run_here("sample/grid.py", "--checkpoint", made, "--steps", 1)
    assert (made / "samples" / "grid_step_0000040.png").is_file()
    run_here("export", "--checkpoint", made, "--to", tmp_path / "exported")
    assert "moving average, width 0.12" in (tmp_path / "exported" / "README.md").read_text()
    with pytest.raises(UserError, match="weights 'raw' are not in .* which has ema_width_0.12"):
        run_here("sample/grid.py", "--checkpoint", made, "--weights", "raw")


def test_a_stored_width_is_its_snapshot_to_the_bit(run, tmp_path):
    run_here(COMMAND, "--run", run, "--width", 0.05, "--step", 20, "--to", tmp_path / "made")
    stored = load_file(find_snapshots(run)[Profile(20, 0.05)])
    made = open_checkpoint(tmp_path / "made").weights("ema")
    assert_equal(made, {name: tensor.float() for name, tensor in stored.items()})


def test_a_width_out_of_reach_is_made_with_a_warning(run, tmp_path, capsys):
    argv = ("--run", run, "--step", 4, "--width")
    run_here(COMMAND, *argv, 0.25, "--to", tmp_path / "far")
    warning = capsys.readouterr().err
    assert "warning: 2 snapshots cannot represent width 0.25" in warning
    assert "choose 0.04 to 0.12, or" in warning
    run_here(COMMAND, *argv, 0.08, "--to", tmp_path / "near")
    assert capsys.readouterr().err == ""


def test_snapshots_after_the_checkpoint_are_left_alone(run, tmp_path, capsys):
    checkpoint = run / "checkpoints" / "step_0000030"
    run_here(COMMAND, "--run", checkpoint, "--width", 0.08, "--to", tmp_path / "made")
    assert "at step 28: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        "step_0000008_width_0.0",
        "step_0000008_width_0.999",
        "step_0000000_width_0.05",
        "x_width_0.05",
    ],
)
def test_names_that_no_snapshot_has_are_ignored(run, name):
    stored = find_snapshots(run)
    shutil.copy(stored[Profile(8, 0.05)], run / "ema_snapshots" / f"{name}.safetensors")
    assert find_snapshots(run) == stored


def test_a_snapshot_beyond_half_precision_is_kept_in_fp32(tmp_path):
    large = {"a": torch.tensor([1e6, 1.0]), "b": torch.tensor([1.0])}
    write_snapshots(tmp_path, 1, {0.05: large})
    stored = load_file(find_snapshots(tmp_path)[Profile(1, 0.05)])
    assert torch.equal(stored["a"], large["a"]) and stored["b"].dtype == DTYPE


def of_integers(run: Path) -> None:
    path = find_snapshots(run)[Profile(24, 0.05)]
    save_file({name: tensor.long() for name, tensor in load_file(path).items()}, path)


def not_finite(run: Path) -> None:
    path = find_snapshots(run)[Profile(24, 0.05)]
    weights = load_file(path)
    weights["final.bias"][0] = float("inf")
    save_file(weights, path)


def without_snapshots(run: Path) -> None:
    shutil.rmtree(run / "ema_snapshots")


def cut_short(run: Path) -> None:
    path = find_snapshots(run)[Profile(24, 0.05)]
    path.write_bytes(path.read_bytes()[:100])


def of_another_model(run: Path) -> None:
    path = find_snapshots(run)[Profile(24, 0.05)]
    weights = load_file(path)
    weights.pop(min(weights))
    save_file(weights, path)


@pytest.mark.parametrize(
    ("break_it", "argv", "message"),
    [
        (lambda run: None, ["--step", 41], "step 41 has no snapshot .*; nearest: 36, 40, 42"),
        (lambda run: None, ["--width", 1e-300], "width 1e-300 must lie between 0.0001 and 0.289"),
        (lambda run: None, ["--width", 0.3], "width 0.3 must lie between 0.0001 and 0.289"),
        (without_snapshots, [], "holds no snapshot up to step 42; train with --ema.widths"),
        (cut_short, [], "step_0000024_width_0.05.safetensors cannot be read: .*; remove it"),
        (of_another_model, [], "step_0000024_width_0.05.safetensors do not fit the model: 1 miss"),
        (of_integers, [], "_0.05.safetensors cannot be used: .* is int64, not float16, float32"),
        (not_finite, [], "_0.05.safetensors cannot be used: final.bias is not finite; remove it"),
        (lambda run: shutil.rmtree(run), [], "does not exist"),
    ],
)
def test_what_cannot_be_made_is_one_line_and_no_folder(run, tmp_path, break_it, argv, message):
    break_it(run)
    base = ["--run", run, "--to", tmp_path / "made"] + (
        [] if "--width" in argv else ["--width", 0.08]
    )
    with pytest.raises(UserError, match=message) as error:
        run_here(COMMAND, *base, *argv)
    assert "\n" not in str(error.value) and not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("ema", "message"),
    [
        (EmaConfig(widths=(0.1,)), "ema.widths .* need each other"),
        (EmaConfig(snapshot_every=5), "ema.snapshot_every 5 need each other"),
        (
            EmaConfig(widths=(0.3,), snapshot_every=5),
            "ema.widths 0.3 must lie between 0.0001 and 0.289",
        ),
        (EmaConfig(widths=(0.0,), snapshot_every=5), "ema.widths 0.0 must be above 0"),
        (EmaConfig(decays=()), "ema.decays"),
    ],
)
def test_averages_that_no_run_can_have_are_refused(ema, message):
    with pytest.raises(UserError, match=message):
        TrainConfig(ema=ema)


def test_a_full_disk_is_one_line_that_says_how_to_go_on(tmp_path, monkeypatch):
    def full(*_) -> None:
        raise OSError("No space left on device")

    run = trainer(tmp_path, "--ema.widths", 0.1)
    monkeypatch.setattr("sit_vit5.training.snapshots.write_tensors", full)
    with pytest.raises(UserError, match="cannot write the snapshot of step 4 .*--resume"):
        run.run()
    assert not find_snapshots(tmp_path / "tiny")


def test_the_start_says_what_snapshots_will_take(tmp_path):
    new = trainer(tmp_path, "--ema.widths", 0.05, 0.1)
    names = ["raw", "ema_0.99", "ema_0.995", "ema_width_0.05", "ema_width_0.1", "optimizer"]
    assert [*new.learner.tensors()] == names
    assert any(line.endswith("GB are free") and "snapshots" in line for line in banner(new))
    plain = banner(trainer(tmp_path, plain=True))
    assert not any("snapshots" in line for line in plain)


def test_widths_alone_name_the_widest_the_slowest():
    config = replace(TrainConfig().ema, decays=(), widths=(0.1, 0.05), snapshot_every=1)
    assert config.slowest == "ema_width_0.1"
    assert TrainConfig(ema=replace(config, decays=(0.9,))).ema.slowest == "ema_0.9"
    assert PosthocEmaConfig("runs/x", 0.1, "y").step is None
