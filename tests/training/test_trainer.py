"""Whole runs in this process, on one block of 16 channels."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import TINY, assert_equal, final_tensors

from sit_vit5.codecs import build_codec
from sit_vit5.config import TrainConfig
from sit_vit5.config.parse import parse_train
from sit_vit5.data import build_source
from sit_vit5.models.checkpoint import open_checkpoint, save_checkpoint
from sit_vit5.training import flow_matching as objective
from sit_vit5.training.trainer import Trainer
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import lock


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


def config(folder: Path, *argv: object, name: str = "run") -> TrainConfig:
    arguments = [*TINY, "--output-dir", folder, "--name", name, *argv]
    return parse_train([str(argument) for argument in arguments])[0]


def trainer(config: TrainConfig, *, resume: Path | None = None, source=None, preview=None):
    return Trainer(
        config,
        source or build_source(config.data),
        build_codec(config.codec.name, config.codec.path),
        preview=preview or (lambda networks, path: None),
        resume=open_checkpoint(resume) if resume else None,
    )


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_and_leaves_a_complete_folder(tmp_path):
    drawn = []
    settings = config(tmp_path, "--steps", 60, "--optimizer.lr", 3e-3, "--preview.every", 30)
    code = trainer(settings, preview=lambda networks, path: drawn.append(list(networks))).run()
    run = tmp_path / "run"
    losses = [row["loss"] for row in rows(run)]
    assert code == 0
    assert losses[-1] < 0.8 * losses[0]
    assert drawn == [["raw", "EMA 0.99", "EMA 0.995"]] * 2
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "loss.png", "latest", "checkpoints"} <= names
    checkpoint = open_checkpoint(run)
    assert checkpoint.config == settings
    assert checkpoint.state.step == 60 and checkpoint.state.images_seen == 960
    assert checkpoint.state.class_names == tuple("0123456789")


def test_first_loss_is_one_plus_the_power_of_the_latents(tmp_path):
    settings = config(tmp_path, "--steps", 1, "--batch-size", 1024, "--accumulation", 4)
    run = trainer(settings)
    power = (run.source.images / 127.5 - 1) ** 2
    run.run()
    assert rows(tmp_path / "run")[0]["loss"] == pytest.approx(1 + power.mean(), rel=0.02)


@pytest.mark.parametrize("stop_at", [1, 5])
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(tmp_path, stop_at):
    options = ("--steps", 9, "--batch-size", 48, "--accumulation", 2)
    trainer(config(tmp_path, *options, name="whole")).run()
    run = trainer(config(tmp_path, *options, name="cut"))
    after_step = run._after_step

    def interrupt_after() -> None:
        after_step()
        if run.step == stop_at:
            signal.raise_signal(signal.SIGTERM)

    run._after_step = interrupt_after
    assert run.run() == 128 + signal.SIGTERM
    cut = tmp_path / "cut"
    assert open_checkpoint(cut).state.step == stop_at
    assert trainer(open_checkpoint(cut).config, resume=cut).run() == 0
    assert_equal(final_tensors(tmp_path / "whole"), final_tensors(cut))
    assert [row["step"] for row in rows(cut)] == list(range(1, 10))
    assert [r["loss"] for r in rows(cut)] == [r["loss"] for r in rows(tmp_path / "whole")]


def test_resume_passes_an_epoch_boundary_exactly(tmp_path, image_folder):
    data = ("--data.source", "folder", "--data.path", image_folder, "--data.horizontal-flip", True)
    options = (*data, "--batch-size", 16, "--steps", 7, "--checkpoint.every", 1)
    trainer(config(tmp_path, *options, name="whole")).run()
    whole = open_checkpoint(tmp_path / "whole")
    trainer(replace(whole.config, name="cut", steps=4)).run()
    trainer(replace(whole.config, name="cut"), resume=tmp_path / "cut").run()
    assert_equal(final_tensors(tmp_path / "whole"), final_tensors(tmp_path / "cut"))


def test_accumulation_changes_only_rounding(tmp_path):
    for parts in (1, 4):
        trainer(config(tmp_path, "--steps", 3, "--accumulation", parts, name=f"{parts}")).run()
    one, four = final_tensors(tmp_path / "1"), final_tensors(tmp_path / "4")
    for name in one:
        torch.testing.assert_close(one[name], four[name], rtol=1e-4, atol=2e-6)


def test_seed_changes_the_run(tmp_path):
    for seed in (0, 1):
        trainer(config(tmp_path, "--steps", 1, "--seed", seed, name=f"{seed}")).run()
    assert rows(tmp_path / "0")[0]["loss"] != rows(tmp_path / "1")[0]["loss"]


def test_finished_run_resumed_does_nothing_and_more_steps_go_on(tmp_path):
    run = tmp_path / "run"
    trainer(config(tmp_path, "--steps", 2)).run()
    before = final_tensors(run)
    assert trainer(open_checkpoint(run).config, resume=run).run() == 0
    assert_equal(before, final_tensors(run))
    trainer(replace(open_checkpoint(run).config, steps=3), resume=run).run()
    assert open_checkpoint(run).state.step == 3


def test_non_finite_steps_are_skipped_counted_and_survived(tmp_path, monkeypatch):
    poison(monkeypatch, steps={2, 3})
    run = trainer(config(tmp_path, "--steps", 6))
    run.run()
    state = open_checkpoint(tmp_path / "run").state
    assert (state.skipped_steps, state.skipped_in_a_row, state.step) == (2, 0, 6)
    assert all(tensor.isfinite().all() for tensor in final_tensors(tmp_path / "run").values())
    assert [row["loss"] is None for row in rows(tmp_path / "run")] == [
        False, False, True, True, False, False,
    ]  # fmt: skip


def test_a_step_whose_norm_is_not_finite_leaves_weights_and_optimizer_alone(tmp_path):
    run = trainer(config(tmp_path, "--steps", 3))
    run.run()
    learner = run.learner
    before = {
        kind: {name: tensor.clone() for name, tensor in tensors.items()}
        for kind, tensors in learner.tensors().items()
        if not kind.startswith("ema")
    }
    for value in (float("inf"), float("nan"), 1.0):
        for parameter in learner.model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        norm = learner.update(3, limit=1e-3)  # the last is finite, but above the limit
        assert not norm <= 1e-3
        for kind, tensors in before.items():
            assert_equal(tensors, learner.tensors()[kind])
    for parameter in learner.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    learner.update(3)
    assert learner.tensors()["optimizer"]["step.final.weight"] == 4
    assert (learner.tensors()["raw"]["final.weight"] != before["raw"]["final.weight"]).all()


def test_ten_non_finite_steps_in_a_row_stop_the_run(tmp_path, monkeypatch):
    poison(monkeypatch, steps=set(range(4, 100)))
    with pytest.raises(UserError, match="10 steps in a row, up to step 14.*step_00000") as error:
        trainer(config(tmp_path, "--steps", 50)).run()
    assert "\n" not in str(error.value)
    assert open_checkpoint(tmp_path / "run").state.step <= 14
    assert all(tensor.isfinite().all() for tensor in final_tensors(tmp_path / "run").values())


def poison(monkeypatch, steps: set[int]) -> None:
    """Makes the loss NaN at some steps, as an overflow would."""
    original = objective.Objective.loss

    def loss(self, model, latents, labels, *, step, micro):
        losses = original(self, model, latents, labels, step=step, micro=micro)
        return losses * float("nan") if step in steps else losses

    monkeypatch.setattr(objective.Objective, "loss", loss)


def test_a_bad_streak_pushes_no_good_checkpoint_out(tmp_path, monkeypatch):
    poison(monkeypatch, steps=set(range(3, 100)))
    settings = config(tmp_path, "--steps", 50, "--checkpoint.every", 1, "--checkpoint.keep", 1)
    with pytest.raises(UserError, match="last good checkpoint: .*step_0000003"):
        trainer(settings).run()
    assert open_checkpoint(tmp_path / "run").state.step == 3


def test_weights_that_an_update_broke_are_never_saved(tmp_path):
    run = trainer(config(tmp_path, "--steps", 9, "--checkpoint.every", 1))
    update = run.learner.update

    def break_weights(step, *, limit):
        norm = update(step, limit=limit)
        next(run.learner.model.parameters()).data.fill_(float("inf"))
        return norm

    run.learner.update = break_weights
    with pytest.raises(UserError, match="not finite.*last good checkpoint: .*step_0000000"):
        run.run()
    assert open_checkpoint(tmp_path / "run").state.step == 0


def test_compile_without_a_compiler_is_refused(tmp_path, monkeypatch):
    from torch._inductor import cpp_builder, exc

    def absent() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", absent)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        trainer(config(tmp_path, "--steps", 1, "--compile", True))


def test_what_a_resume_changed_outlives_its_interruption(tmp_path):
    trainer(config(tmp_path, "--steps", 1)).run()
    run = tmp_path / "run"
    faster, checkpoint = parse_train(["--resume", str(run), "--steps", "5"])
    longer = trainer(faster, resume=checkpoint)
    longer.words.largest = lambda number: signal.SIGTERM if number is not False else 0
    longer.run()
    again, checkpoint = parse_train(["--resume", str(run)])
    assert again.steps == 5 and open_checkpoint(checkpoint).config.steps == 1


def test_max_skipped_sets_the_length_of_the_streak(tmp_path, monkeypatch):
    poison(monkeypatch, steps=set(range(100)))
    with pytest.raises(UserError, match="3 steps in a row, up to step 3"):
        trainer(config(tmp_path, "--steps", 50, "--max-skipped", 3)).run()


def test_gradients_are_clipped_and_the_norm_before_clipping_is_logged(tmp_path):
    for clip in (0, 0.01):
        settings = config(
            tmp_path, "--steps", 1, "--optimizer.clip-norm", clip, "--optimizer.eps", 1,
            name=f"clip{clip}",
        )  # fmt: skip
        trainer(settings).run()
    free, clipped = final_tensors(tmp_path / "clip0"), final_tensors(tmp_path / "clip0.01")
    assert rows(tmp_path / "clip0")[0]["grad_norm"] == rows(tmp_path / "clip0.01")[0]["grad_norm"]
    name = "optimizer/exp_avg.final.weight"
    ratio = (free[name].norm() / clipped[name].norm()).item()
    assert ratio == pytest.approx(rows(tmp_path / "clip0")[0]["grad_norm"] / 0.01, rel=1e-3)


def test_log_rows_hold_the_mean_over_their_interval(tmp_path):
    trainer(config(tmp_path, "--steps", 4, name="each")).run()
    trainer(config(tmp_path, "--steps", 4, "--log-every", 4, name="mean")).run()
    each = [row["loss"] for row in rows(tmp_path / "each")]
    (row,) = rows(tmp_path / "mean")
    assert row["loss"] == pytest.approx(sum(each) / 4, rel=1e-6)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_labels_are_dropped_at_the_configured_rate_and_leave_no_trace(tmp_path, rate):
    settings = config(tmp_path, "--batch-size", 1024, "--objective.class-dropout", rate)
    goal = trainer(settings).steps.objective
    first = goal._labels(torch.zeros(1024, dtype=torch.long), 3, range(1024))
    other = goal._labels(torch.full((1024,), 7), 3, range(1024))
    dropped = first == goal.null_label
    assert abs(dropped.float().mean().item() - rate) < 0.06
    assert (dropped == (other == goal.null_label)).all()  # the draw does not see the label
    assert (other[~dropped] == 7).all()


def test_a_stop_right_after_a_save_does_not_save_again(tmp_path, monkeypatch):
    run = trainer(config(tmp_path, "--steps", 4))
    written, after_step = [], run._after_step

    def record(folder, state, *arguments, **tensors):
        written.append(state.step)
        return save_checkpoint(folder, state, *arguments, **tensors)

    def stop_after_two() -> None:
        after_step()
        if run.step == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("sit_vit5.training.saver.save_checkpoint", record)
    run._after_step = stop_after_two
    assert run.run() == 128 + signal.SIGTERM
    assert written == [0, 2]


def test_options_changed_on_resume_are_said(tmp_path, capsys):
    run = tmp_path / "run"
    trainer(config(tmp_path, "--steps", 1)).run()
    trained = open_checkpoint(run).config
    faster = replace(trained, steps=2, optimizer=replace(trained.optimizer, lr=0.1))
    trainer(faster, resume=run).run()
    said = capsys.readouterr().out
    assert "changed on resume: optimizer.lr: 0.002 -> 0.1" in said
    with pytest.raises(UserError, match="name: run -> other"):
        trainer(replace(trained, name="other"), resume=run)


def test_a_batch_changed_on_resume_is_allowed_and_what_it_does_to_the_order_said(tmp_path, capsys):
    run = tmp_path / "run"
    trainer(config(tmp_path, "--steps", 3)).run()
    trained = open_checkpoint(run).config
    trainer(replace(trained, steps=5, batch_size=32), resume=run).run()
    said = capsys.readouterr().out
    assert "it goes on at image 96 instead of 48, those between are passed over" in said
    assert open_checkpoint(run).state.images_seen == 3 * 16 + 2 * 32
    assert [row["images"] for row in rows(run)] == [16, 32, 48, 80, 112]


def test_averages_kept_on_the_host_are_the_same(tmp_path):
    for device in ("model", "host"):
        trainer(config(tmp_path, "--ema.device", device, "--steps", 3, name=device)).run()
    assert_equal(final_tensors(tmp_path / "model"), final_tensors(tmp_path / "host"))


def test_the_folder_of_another_run_is_refused(tmp_path):
    trainer(config(tmp_path, "--steps", 1)).run()
    with pytest.raises(UserError, match=r"holds another run, at step 1; continue it with --resume"):
        trainer(config(tmp_path, "--steps", 1))


def test_a_run_in_use_is_refused(tmp_path):
    waiting = trainer(config(tmp_path, "--steps", 1))
    with lock(tmp_path / "run", "training run"):
        with pytest.raises(UserError, match="in use by another training run"):
            waiting.run()
    assert waiting.run() == 0


def test_resume_refuses_another_model_data_or_objective(tmp_path):
    run = tmp_path / "run"
    trainer(config(tmp_path, "--steps", 1)).run()
    trained = open_checkpoint(run).config
    for changed, message in (
        (replace(trained, backbone=replace(trained.backbone, depth=2)), "backbone.depth: 1 -> 2"),
        (replace(trained, seed=5), "seed: 0 -> 5"),
        (replace(trained, data=replace(trained.data, unconditional=True)), "other data"),
    ):
        with pytest.raises(UserError, match=message):
            trainer(changed, resume=run)


def test_resume_refuses_to_rewind_over_newer_checkpoints(tmp_path):
    trainer(config(tmp_path, "--steps", 4)).run()
    old = tmp_path / "run" / "checkpoints" / "step_0000002"
    with pytest.raises(UserError, match="not the newest checkpoint of its run"):
        trainer(open_checkpoint(old).config, resume=old)


def test_init_from_starts_a_new_run_with_the_averaged_weights(tmp_path, capsys):
    trainer(config(tmp_path, "--steps", 8, "--optimizer.lr", 1e-2, name="old")).run()
    settings = config(tmp_path, "--steps", 1, "--init-from", tmp_path / "old", name="new")
    new = trainer(settings)
    average = open_checkpoint(tmp_path / "old").weights("ema")
    assert all((new.learner.model.state_dict()[name] == average[name]).all() for name in average)
    assert new.step == 0
    other = config(
        tmp_path, "--steps", 1, "--init-from", tmp_path / "old", "--data.unconditional", True,
        "--backbone.recipe.registers", 1, "--preview.guidance-scale", 1, name="other",
    )  # fmt: skip
    trainer(other).run()
    said = capsys.readouterr().out
    assert "freshly initialised: registers" in said
    wrong = config(tmp_path, "--init-from", tmp_path / "old", "--backbone.width", 32, name="w")
    with pytest.raises(UserError, match="no weight"):
        trainer(replace(wrong, backbone=replace(wrong.backbone, patch_size=4, depth=1)))


def test_init_from_other_classes_of_the_same_number_leaves_the_label_table(
    tmp_path, image_folder, capsys
):
    data = ("--data.source", "folder", "--batch-size", 4, "--steps", 1)
    trainer(config(tmp_path, *data, "--data.path", image_folder, name="pets")).run()
    image_folder.rename(tmp_path / "plants")
    for old, new in (("cat", "oak"), ("dog", "rose")):
        (tmp_path / "plants" / old).rename(tmp_path / "plants" / new)
    options = ("--data.path", tmp_path / "plants", "--init-from", tmp_path / "pets")
    trainer(config(tmp_path, *data, *options, name="plants-run")).run()
    assert "freshly initialised: conditioning.labels.weight" in capsys.readouterr().out


def test_resume_refuses_a_checkpoint_outside_a_run_and_another_codec(tmp_path):
    run = tmp_path / "run"
    trainer(config(tmp_path, "--steps", 1)).run()
    alone = tmp_path / "alone"
    shutil.copytree(open_checkpoint(run).folder, alone)
    with pytest.raises(UserError, match="outside a run folder; start a new run with --init-from"):
        trainer(open_checkpoint(alone).config, resume=alone)
    state = run / "checkpoints" / "step_0000001" / "state.json"
    state.write_text(state.read_text().replace('"identity"', '"other"'))
    with pytest.raises(UserError, match="trained with {'name': 'other'}"):
        trainer(open_checkpoint(run).config, resume=run)


def test_a_failing_preview_does_not_stop_the_run(tmp_path, capsys):
    def broken(networks, path) -> None:
        raise UserError("non-finite images")

    settings = config(tmp_path, "--steps", 2, "--preview.every", 1)
    assert trainer(settings, preview=broken).run() == 0
    assert "warning: no picture at step 1: non-finite images" in capsys.readouterr().out


def test_an_unconditional_run_trains(tmp_path):
    settings = config(tmp_path, "--steps", 2, "--data.unconditional", True)
    assert trainer(settings).run() == 0
    assert open_checkpoint(tmp_path / "run").state.class_names == ()


def test_bf16_trains_to_a_falling_finite_loss(tmp_path):
    settings = config(
        tmp_path, "--steps", 60, "--precision", "bf16", "--optimizer.lr", 3e-3,
        "--checkpoint.every", 0,
    )  # fmt: skip
    trainer(settings).run()
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    assert losses[-1] < 0.8 * losses[0]
    assert {t.dtype for t in final_tensors(tmp_path / "run").values()} == {torch.float32}


def test_a_bad_image_saves_what_there_is_and_names_the_file(tmp_path, image_folder):
    bad = image_folder / "dog" / "07.png"
    data = ("--data.source", "folder", "--data.path", image_folder, "--batch-size", 4)
    settings = config(tmp_path, "--steps", 6, "--checkpoint.every", 0, *data)
    bad.write_bytes(b"broken")  # before the start: a resume compares the files' contents
    run = trainer(settings)
    with pytest.raises(UserError, match="07.png: cannot be decoded"):
        run.run()
    assert open_checkpoint(tmp_path / "run").state.step == run.step
    skipping = replace(settings, data=replace(settings.data, on_bad_image="skip"))
    assert trainer(skipping, resume=tmp_path / "run").run() == 0
    assert "07.png" in (tmp_path / "run" / "bad_images.txt").read_text()


def test_resume_refuses_images_changed_under_their_names(tmp_path, image_folder):
    data = ("--data.source", "folder", "--data.path", image_folder, "--batch-size", 4)
    settings = config(tmp_path, "--steps", 1, *data)
    trainer(settings).run()
    (image_folder / "dog" / "07.png").write_bytes((image_folder / "dog" / "08.png").read_bytes())
    with pytest.raises(UserError, match="other data than the run was trained on"):
        trainer(replace(settings, steps=2), resume=tmp_path / "run")


def test_keep_removes_old_checkpoints_but_never_the_newest(tmp_path):
    trainer(config(tmp_path, "--steps", 7, "--checkpoint.keep", 2)).run()
    folders = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert folders == ["step_0000006", "step_0000007"]


def test_batch_and_data_that_do_not_fit_are_refused_before_the_folder_exists(tmp_path):
    for options, message in (
        (("--batch-size", 10, "--accumulation", 3), "use 9 or 12"),
        (("--batch-size", 2000), "1437 images are fewer"),
        (("--backbone.patch-size", 3), "image_size 8 is not divisible by 3.*use 6 or 9"),
    ):
        with pytest.raises(UserError, match=message):
            trainer(config(tmp_path, *options))
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_with_another_precision_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(UserError, match="mixed_precision fp16.*precision fp32"):
        trainer(config(tmp_path, "--steps", 1))


def test_drawing_cannot_change_the_weights_in_training(tmp_path):
    def vandal(networks, path) -> None:
        for network in networks.values():
            for parameter in network.parameters():
                parameter.data.zero_()

    options = ("--steps", 4, "--preview.every", 1)
    trainer(config(tmp_path, *options, name="drawn"), preview=vandal).run()
    trainer(config(tmp_path, "--steps", 4, name="plain")).run()
    assert_equal(final_tensors(tmp_path / "plain"), final_tensors(tmp_path / "drawn"))


def test_attention_and_recompute_are_written_down_and_change_only_rounding(tmp_path, capsys):
    trainer(config(tmp_path, "--steps", 2, name="plain")).run()
    plain = final_tensors(tmp_path / "plain")
    trainer(config(tmp_path, "--steps", 2, "--activation-checkpointing", True, name="again")).run()
    assert_equal(final_tensors(tmp_path / "again"), plain)
    assert "recomputed in the backward pass, fused attention" in capsys.readouterr().out
    options = ("--attention", "fp32_math")
    math = trainer(config(tmp_path, "--steps", 2, *options, name="math"))
    assert all(block.attention.fp32_math for block in math.learner.model.blocks)
    assert all(block.attention.fp32_math for block in math.learner.copy("raw").blocks)
    math.run()
    for name, tensor in final_tensors(tmp_path / "math").items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_never_waits_for_what_it_has_just_queued(tmp_path):
    """On CUDA every copy that waits for the queued work is an error inside the block."""
    run = trainer(config(tmp_path, "--steps", 4, "--accumulation", 2, "--compile", False))
    batches = [next(run.loader.steps(step)) for step in range(4)]
    run.steps.train(batches[0])  # tables are built and kernels loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        for later in batches[1:]:
            run.steps.train(later)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.steps.settle()
    assert run.steps.watchdog.skipped == 0
