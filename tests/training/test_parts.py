"""Optimizer, watchdog, log and interruption on their own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from sit_vit5.codecs.autoencoder import scale_warnings
from sit_vit5.config import TrainConfig
from sit_vit5.training.logging import RunLog, append_whole, read_rows, report_bad_images
from sit_vit5.training.run import check_image_size
from sit_vit5.training.watchdog import Interrupt
from sit_vit5.utils.errors import UserError


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
    monkeypatch.setattr("sit_vit5.training.logging.time.monotonic", lambda: now[0])
    for seconds, pause in ((0.1, 60), (5, 500)):  # at most a hundredth of the time
        monkeypatch.setattr(
            "sit_vit5.training.logging.write_page",
            lambda *arguments, taken=seconds: now.__setitem__(0, now[0] + taken),
        )
        run_log = RunLog(tmp_path, TrainConfig(steps=10, trackers=()), first_step=0)
        (tmp_path / "latest").touch()
        run_log._write_page()
        assert run_log._next_page - now[0] == pytest.approx(pause)
        run_log.bar.close()


def metrics(run_log: RunLog, *steps: int) -> None:
    for step in steps:
        run_log.step_done(0.5, 0.1)
        run_log.metrics(
            step=step, epoch=0.1, images=4 * step, loss=1.0, lr=1e-3, skipped_steps=0, grad_norm=2.0
        )


def open_log(run: Path, first_step: int = 0, **options) -> RunLog:
    config = TrainConfig(steps=10, batch_size=4, trackers=(), **options)
    return RunLog(run, config, first_step=first_step)


LOGS = ("metrics.jsonl", "evaluations.jsonl", "events.jsonl")
DAMAGES = (
    {"step": "x"}, {"step": None}, {"step": True}, {"step": 1.5}, {"step": -1}, {"step": 10**30},
    {"loss": "x", "values": {"a": "b"}, "kind": 5}, {"grad_norm": {}, "values": 5, "text": None},
    {"skipped_steps": "x", "weights": 1, "unix_time": 1e300}, {"images": [1], "step": {}},
)  # fmt: skip


def test_damaged_rows_of_the_logs_are_skipped_on_resume(tmp_path):
    row = {
        "step": 2, "loss": 1.0, "grad_norm": 1.0, "weights": "ema", "values": {}, "kind": "saved",
        "text": "", "unix_time": 0, "images": 1, "skipped_steps": 0, "images_per_second": 1,
    }  # fmt: skip
    lines = [json.dumps(row | damage) for damage in DAMAGES] + ["[" * 100_000, json.dumps(row)]
    for name in LOGS:
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        assert read_rows(tmp_path / name) == [row]
    (tmp_path / "latest").touch()
    run_log = open_log(tmp_path, first_step=3)
    metrics(run_log, 4)
    run_log.evaluated("ema", {"FID": 3.0}, seconds=1)
    run_log.draw_loss()
    run_log.close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [2, 4]
    assert (tmp_path / "run.html").is_file() and (tmp_path / "loss.png").is_file()


def test_a_log_that_cannot_be_written_warns_once_and_catches_up(tmp_path, capsys, monkeypatch):
    run_log = open_log(tmp_path)
    metrics(run_log, 1)
    log = tmp_path / "metrics.jsonl"
    whole = log.read_bytes()

    def full(path, *arguments):
        if path == log:
            with log.open("ab") as file:
                file.write(b'{"step": 2, "lo')  # a part of it still has room
            os.truncate(log, len(whole))
            raise OSError(28, "No space left on device")
        append_whole(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr("sit_vit5.training.logging.append_whole", full)
        metrics(run_log, 2, 3)
    assert log.read_bytes() == whole
    assert capsys.readouterr().out.count("metrics.jsonl not written: [Errno 28]") == 1
    metrics(run_log, 4)
    assert [row["step"] for row in read_rows(log)] == [1, 2, 3, 4]
    run_log.close()


def test_an_append_is_whole_or_absent_and_on_a_line_of_its_own(tmp_path):
    resource = pytest.importorskip("resource")
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "lo')  # cut by a kill
    append_whole(path, "second\n")
    assert path.read_text().splitlines() == ['{"step": 1, "lo', "second"]
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(OSError):
            append_whole(path, "x" * 100 + "\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before


def test_rows_of_later_steps_stay_until_a_step_takes_their_place(tmp_path):
    log = open_log(tmp_path)
    metrics(log, 1, 2, 3)
    log.close()
    resumed = open_log(tmp_path, first_step=1)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    metrics(resumed, 2)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]
    resumed.close()


def test_advice_on_slow_data_knows_a_latent_cache(tmp_path, capsys):
    for cached, advice in ((False, "or encode the data once"), (True, "or copy the latent cache")):
        run_log = RunLog(tmp_path, TrainConfig(steps=10, trackers=()), first_step=0, cached=cached)
        metrics(run_log, 1)
        run_log.step_done(0.5, 0.4)
        metrics(run_log, 2)
        assert advice in capsys.readouterr().out
        run_log.close()


def test_bad_images_with_odd_names_are_listed_on_one_line(tmp_path):
    (tmp_path / "bad_images.txt").write_bytes(b"\xff\n")
    said = report_bad_images(tmp_path, ["a\udcff.png", "b\nwarning: c.png"])
    assert "3 bad images" in said[0]
    lines = (tmp_path / "bad_images.txt").read_bytes().splitlines()
    assert lines == [b"\xff", rb"a\udcff.png", rb"b\nwarning: c.png"]


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
    assert bool(scale_warnings("sd-vae-ema", 0.0, scale)) is warned
