"""Optimizer, watchdog, log and interruption on their own."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

from sit_vit5.codecs.normalisation import scale_warnings
from sit_vit5.config import TrainConfig
from sit_vit5.errors import UserError
from sit_vit5.training.interrupt import Interrupt
from sit_vit5.training.run import check_image_size
from sit_vit5.training.run_log import RunLog, report_bad_images


def test_first_signal_is_remembered_and_a_second_ctrl_c_stops_at_once():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has no SIGUSR1")
def test_a_schedulers_signal_is_remembered_and_its_old_handler_comes_back():
    before = signal.getsignal(signal.SIGUSR1)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert interrupt.signal == 10  # the trainer exits with 128 + 10
    assert signal.getsignal(signal.SIGUSR1) is before


def test_log_rows_are_valid_json_and_a_resumed_log_has_no_step_twice(tmp_path, capsys):
    def log(first_step: int, steps: list[int]) -> None:
        run_log = RunLog(tmp_path, TrainConfig(steps=10, batch_size=4), first_step=first_step)
        for step in steps:
            run_log.step_done(0.5, 0.1)
            loss = None if step == 2 else 1.0
            run_log.metrics(
                step=step, epoch=0.1, images=4 * step, loss=loss, lr=1e-3, skipped_steps=0,
                grad_norm=float("nan") if loss is None else 2.0,
            )  # fmt: skip
        run_log.draw_loss()
        run_log.close()

    log(0, [1, 2, 3, 4])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('12\n[]\n{"loss": 1}\n{"step": 5, "lo')  # a kill cut this line
    log(2, [3, 4])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[1]["loss"] is None and rows[1]["grad_norm"] is None
    assert rows[0]["images_per_second"] == 8 and rows[0]["images"] == 4
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "ETA 0:00:03" in capsys.readouterr().out


def test_a_page_that_takes_long_is_written_seldom(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("sit_vit5.training.run_log.time.monotonic", lambda: now[0])
    for seconds, pause in ((0.1, 60), (5, 500)):  # at most a hundredth of the time
        monkeypatch.setattr(
            "sit_vit5.training.run_log.write_page",
            lambda *arguments, taken=seconds: now.__setitem__(0, now[0] + taken),
        )
        run_log = RunLog(tmp_path, TrainConfig(steps=10, trackers=()), first_step=0)
        run_log._write_page()
        assert run_log._next_page - now[0] == pytest.approx(pause)
        run_log.bar.close()


def test_bad_images_are_listed_once(tmp_path):
    assert "2 bad images" in report_bad_images(tmp_path, ["b", "a", "a"])[0]
    assert report_bad_images(tmp_path, ["a"]) == []
    assert "3 bad images" in report_bad_images(tmp_path, ["c"])[0]
    assert (tmp_path / "bad_images.txt").read_text() == "a\nb\nc\n"


def test_image_size_must_split_into_patches_of_latents():
    check_image_size(256, 8, 2)
    with pytest.raises(UserError, match="250 is not divisible by 16 .*use 240 or 256"):
        check_image_size(250, 8, 2)
    with pytest.raises(UserError, match="use 16"):
        check_image_size(8, 8, 2)


@pytest.mark.parametrize(
    ("scale", "warned"), [(1.0, False), (0.6, False), (0.1, True), (7.0, True)]
)
def test_latents_far_from_unit_scale_are_warned_of(scale, warned):
    latents = scale * torch.randn(64, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    mean, std = latents.mean().item(), latents.std().item()
    assert bool(scale_warnings("sd-vae-ema", mean, std)) is warned
