"""run.html: whole, alone, escaped; from made-up rows, from real runs and in a browser."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from helpers import BROWSER, ROOT, TINY, Page, screenshot
from PIL import Image

from sit_vit5.codecs import build_codec
from sit_vit5.config import GenerateConfig
from sit_vit5.config.parse import parse, parse_train
from sit_vit5.data import build_source
from sit_vit5.models.checkpoint import open_checkpoint
from sit_vit5.report.curves import Axis, curve, means, thin
from sit_vit5.report.published import SAMPLER_FLAGS
from sit_vit5.report.run_page import EMBEDDED, write_page
from sit_vit5.training.stepping import Stepping
from sit_vit5.training.trainer import Trainer


def config(*argv: object):
    return parse_train([str(word) for word in (*TINY, *argv)])[0]


def rows(count: int) -> list[dict]:
    """A second per row of 100 images at 200 images/s: half of the time is outside the steps."""
    return [
        {
            "step": i, "epoch": i / 10, "images": 100 * i, "loss": 1 / i, "grad_norm": 2.0,
            "lr": 1e-3, "skipped_steps": 0, "images_per_second": 200.0, "unix_time": 1e9 + i,
        }
        for i in range(1, count + 1)
    ]  # fmt: skip


def event(kind: str, text: str, step: int = 0) -> dict:
    return {"step": step, "unix_time": 1e9, "kind": kind, "text": text}


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder with a name that must be escaped and more grids than are embedded."""
    run = tmp_path / "<b>run & $name"
    (run / "samples").mkdir(parents=True)
    for number in range(EMBEDDED + 2):
        pixels = np.full((4, 4, 3), 40 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(run / "samples" / f"step_{number:07d}.png")
    return run


def test_page_is_well_formed_alone_and_escaped(run):
    evil = '<script src="http://evil">"&'
    events = [event("started", "x"), event("data", f"2 classes (0 {evil})"), event("note", evil)]
    write_page(run, config("--output-dir", evil, "--steps", 40), rows(20), events)
    text = (run / "run.html").read_text()
    page = Page(text)
    assert page.text.count(evil) == 4  # class name, note, changed option, whole configuration
    assert "<b>run & $name" in page.text
    assert not {"script", "b", "link", "iframe"} & set(page.tags)
    assert "@import" not in text and "url(" not in text
    links = page.links()
    assert all(link.startswith(("data:image/", "samples/step_")) for link in links)
    assert sum(link.startswith("data:") for link in links) == EMBEDDED
    newest = [int(step) for step in re.findall(r"<figcaption>step (\d+)", text)]
    assert newest == sorted(newest, reverse=True) and newest[0] == EMBEDDED + 1


def test_page_tells_progress_time_and_differences(run):
    write_page(run, config("--steps", 40), rows(20), [event("started", "x")])
    text = Page((run / "run.html").read_text()).text
    assert "20 of 40" in text and "2,000" in text
    assert "left0:00:02" in text  # 20 steps of 16 images at 200/s
    assert "50.0%" in text  # half of each second was outside of steps
    assert "optimizer.lr0.0020.0001" in text.replace("\n", "")
    assert "preview.columns14" in text.replace("\n", "")


@pytest.mark.parametrize(
    ("last", "steps", "state"),
    [
        ("started", 40, "running"),
        ("interrupted", 40, "interrupted"),
        ("failed", 40, "failed"),
        ("resumed", 20, "finished"),
    ],
)
def test_state_is_that_of_the_last_event(run, last, steps, state):
    write_page(run, config("--steps", steps), rows(20), [event("started", ""), event(last, "")])
    assert f"<title>&lt;b&gt;run &amp; $name: {state}<" in (run / "run.html").read_text()


def test_page_without_rows_or_events_is_whole(tmp_path):
    write_page(tmp_path, config(), [], [])
    assert "no value yet" in Page((tmp_path / "run.html").read_text()).text


EVALUATED = {
    "--data.image-size": 256, "--evaluation.every": 10, "--evaluation.num-samples": 10_000,
    "--evaluation.reference": "x/VIRTUAL_imagenet256_labeled.npz", "--model": "ViT5-S/2",
}  # fmt: skip


def evaluated(run: Path, changes: dict, metric: str = "FID-10000") -> str:
    """The page of a run that was evaluated twice."""
    values = [{"step": n * 50_000, "weights": "ema", "values": {metric: 80.0}} for n in (1, 2)]
    options = [word for pair in (EVALUATED | changes).items() for word in pair]
    write_page(run, config(*options), rows(2), [], values)
    return (run / "run.html").read_text()


def test_published_values_are_drawn_beside_a_run_of_that_model(run):
    text = evaluated(run, {})
    assert text.count('class="beside"') == 2
    assert "step 400,000: ViT-5-S/2, published 47.7" in text
    assert "step 800,000: ViT-5-S/2, published 39.9" in text
    assert "step 700,000: SiT-S/2, published 49.6" in text
    assert "cannot be compared with this curve, of 10,000 samples by heun in 25 steps" in text


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({"--model": "ViT5-Nano/2"}, "FID-10000"),
        ({}, "sFID-10000"),
        ({"--evaluation.guidance-scale": 1.5}, "FID-10000"),
        ({"--evaluation.reference": "flowers.npz"}, "FID-10000"),
        ({"--data.image-size": 512}, "FID-10000"),
    ],
)
def test_published_values_are_drawn_beside_no_other_run(run, changes, metric):
    assert 'class="beside"' not in evaluated(run, changes, metric)


def test_sampling_commands_of_a_published_model_are_those_of_its_values(tmp_path):
    for model, expected in (("ViT5-S/2", True), ("ViT5-Nano/2", False)):
        write_page(tmp_path, config("--data.image-size", 256, "--model", model), [], [])
        page = Page((tmp_path / "run.html").read_text())
        assert (f"samples/50k {SAMPLER_FLAGS}" in page.text) == expected
    argv = f"--checkpoint x {SAMPLER_FLAGS}".split()
    assert parse(GenerateConfig, argv).precision == "tf32"


def path_points(svg: str, kind: str) -> list[str]:
    (data,) = re.findall(rf'<path class="{kind}" d="([^"]*)"', svg)
    return re.findall("[ML]", data)


def test_curves_have_a_point_per_value_and_gaps_where_there_is_none():
    points = [(1, 1.0), (2, 2.0), (3, None), (4, 3.0), (5, float(4))]
    svg = curve(points, name="loss", log=True, marks=[4, 99])
    assert path_points(svg, "curve") == ["M", "L", "M", "L"]
    assert svg.count('class="mark"') == 1 and "resumed at step 4" in svg
    assert "<title>step 2: loss 2</title>" in svg
    Page(svg)


def test_long_curves_keep_their_extremes_in_at_most_1000_points():
    values = np.random.default_rng(0).normal(size=9_999)
    values[1234], values[8000] = 50, -50
    points = list(enumerate(values.tolist()))
    kept = thin(points)
    assert 900 < len(kept) <= 1000
    assert (1234, 50.0) in kept and (8000, -50.0) in kept
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)
    assert thin([(step, None) for step, _ in points])[0] == (0, None)
    averages = means(points, 3)
    assert averages[0] == (3332, pytest.approx(values[:3333].mean()))
    assert len(path_points(curve(points, name="x", log=False), "curve")) == len(kept)


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("value", [0.0, 1e-4, 3.0])
def test_a_flat_curve_and_a_single_point_have_an_axis(value, log):
    for points in ([(5, value)], [(5, value), (6, value)]):
        numbers = re.findall(r'd="M([\d.]+) ([\d.]+)h0', curve(points, name="x", log=log))
        assert len(numbers) == 2
    assert "nan" not in curve([(5, value)], name="x", log=log)


def test_axis_ticks_are_round_and_inside():
    assert Axis(0, 1, 0, 1).ticks() == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert Axis(0.5, 2000, 0, 1, log=True).ticks() == [1, 10, 100, 1000]
    assert Axis(0.3, 20, 0, 1, log=True).ticks() == [0.5, 1, 2, 5, 10, 20]
    assert Axis(1, 100, 0, 2, log=True).place(10) == pytest.approx(1)


def train(tmp_path: Path, *argv: object, resume: Path | None = None, stop_at: int = 0) -> Path:
    settings = config("--output-dir", tmp_path, *argv)
    trainer = Trainer(
        settings, build_source(settings.data), build_codec(settings.codec.name, None),
        preview=lambda networks, path: Image.new("RGB", (8, 8)).save(path),
        resume=open_checkpoint(resume) if resume else None,
    )  # fmt: skip
    after_step = trainer._after_step

    def interrupt() -> None:
        after_step()
        if trainer.step == stop_at:
            signal.raise_signal(signal.SIGTERM)

    trainer._after_step = interrupt
    trainer.run()
    return tmp_path / "tiny"


def test_page_of_a_resumed_run_shows_the_events_of_both_sessions(tmp_path):
    run = train(tmp_path, "--preview.every", 2, stop_at=2)
    page = Page((run / "run.html").read_text())
    assert "2 of 6" in page.text and "interrupted" in page.text
    assert sum(link.startswith("data:") for link in page.links()) == 1
    train(tmp_path, "--steps", 4, "--preview.every", 2, resume=run)
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    first = ["started", "model", "data", "batch", "precision", "saved", "saved", "interrupted"]
    assert kinds[: len(first)] == first
    assert [kind for kind in kinds if kind not in ("model", "data", "batch", "precision")][4:] == [
        "resumed", "changed on resume", "saved", "done",
    ]  # fmt: skip
    text = Page((run / "run.html").read_text()).text
    assert all(kind in text for kind in kinds)
    assert "steps: 6 -&gt; 4" in (run / "run.html").read_text()


def test_a_failed_run_says_why_on_its_page(tmp_path, monkeypatch):
    monkeypatch.setattr(Stepping, "train", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path)
    text = (tmp_path / "tiny" / "run.html").read_text()
    assert ": failed</title>" in text and "division by zero" in text


def test_a_page_that_cannot_be_written_is_one_warning(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("sit_vit5.training.logging.write_page", fail)
    run = train(tmp_path)
    assert open_checkpoint(run).state.step == 6
    assert capsys.readouterr().out.count("run.html not written: no space left") == 1


def test_skipped_steps_are_an_event_each_interval(tmp_path, monkeypatch):
    from sit_vit5.training.watchdog import Watchdog

    accepts = Watchdog.accepts
    monkeypatch.setattr(
        Watchdog, "accepts", lambda self, step, norm, bad: accepts(self, step, float("nan"))
    )
    run = train(tmp_path, "--steps", 4, "--log-every", 2)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    skipped = [(e["step"], e["text"]) for e in events if e["kind"] == "skipped"]
    assert skipped == [
        (2, "2 steps, their gradient was not finite or too large"),
        (4, skipped[0][1]),
    ]


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on this machine")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_shows_the_page(run, tmp_path, width):
    write_page(run, config("--steps", 40), rows(20), [event("started", "x")])
    shutil.copy(run / "run.html", tmp_path / "run.html")
    pixels = screenshot(tmp_path / "run.html", tmp_path, width=width)
    assert pixels.shape[0] == 1000
    blue = (pixels[..., 2] > 150) & (pixels[..., 0] < 90)  # curves and progress
    assert blue.sum() > 1000
