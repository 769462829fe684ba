"""Logs of a run: JSON lines in its folder, trackers, console lines and run.html."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from annotated_types import Ge, Le
from PIL import Image
from tqdm import tqdm

from sit_vit5.config import TrainConfig
from sit_vit5.config.parse import dump_config, flatten, to_dict
from sit_vit5.report.run_page import write_page
from sit_vit5.utils.errors import UserError, brief, choose
from sit_vit5.utils.files import Count, check_plain, parse_json, replacing, write_text
from sit_vit5.utils.run_folder import (
    BAD_IMAGES,
    EVALUATIONS_FILE,
    EVENTS_FILE,
    LATEST_FILE,
    LOSS_PLOT,
    METRICS_FILE,
    PAGE_FILE,
)
from sit_vit5.utils.streams import printable

Number = Annotated[float, Ge(-1e300), Le(1e300)]
Time = Annotated[float, Ge(0), Le(1e11)]  # seconds since 1970


@dataclass(frozen=True)
class MetricsRow:
    """A row of metrics.jsonl: means over the steps since the row before. loss and grad_norm None:
    not finite."""

    step: Count
    loss: Number | None
    grad_norm: Number | None
    epoch: Number = 0
    images: Count = 0
    lr: Number = 0
    skipped_steps: Count = 0
    images_per_second: Number = 0
    data_wait: Number = 0
    unix_time: Time = 0


@dataclass(frozen=True)
class EvaluationRow:
    """A row of evaluations.jsonl: metrics, by name, of samples of these weights."""

    step: Count
    weights: str
    values: dict[str, Number]


@dataclass(frozen=True)
class EventRow:
    """A row of events.jsonl."""

    step: Count
    unix_time: Time
    kind: str
    text: str


ROWS = {METRICS_FILE: MetricsRow, EVALUATIONS_FILE: EvaluationRow, EVENTS_FILE: EventRow}


def read_rows(path: Path) -> list[dict]:
    """The rows of a file of one of these names. Damaged ones are skipped: a run needs none."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else []
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            parse_json(line, ROWS[path.name], source=path)
        except UserError:  # such as the tail of a line that a kill cut off
            continue
        rows.append(json.loads(line))
    return rows


class LogFiles:
    """Appends to such files. What the disk does not take is kept, and written with a later row.

    say: prints a line.
    """

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self._unwritten: dict[Path, str] = {}

    def append(self, path: Path, row: dict) -> None:
        """Adds a row; if that fails, says so, once until it works again."""
        before = self._unwritten.get(path, "")
        text = before + json.dumps(row) + "\n"
        try:
            append_whole(path, text)
            self._unwritten.pop(path, None)
        except (OSError, UserError) as error:  # a failing log must not stop training
            self._unwritten[path] = text
            if not before:
                self.say(f"warning: {path} not written: {brief(error)}; training continues")

    def keep(self, path: Path, *, up_to: int) -> None:
        """Removes the rows of later steps: a resumed run writes them again."""
        try:
            rows = read_rows(path)
            kept = [row for row in rows if row["step"] <= up_to]
            if len(kept) < len(rows):
                write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        except (OSError, UserError) as error:
            self.say(f"warning: {path} holds steps after {up_to} twice: {brief(error)}")


def append_whole(path: Path, text: str) -> None:
    """Appends text on a line of its own; if there is no room for all of it, nothing is appended."""
    check_plain(path)
    with path.open("ab+") as file:
        size = file.tell()
        file.seek(max(size - 1, 0))
        cut = size > 0 and file.read(1) != b"\n"  # by a kill
    try:
        with path.open("ab") as file:
            file.write(b"\n" * cut + text.encode("utf-8", "backslashreplace"))
    except OSError:
        os.truncate(path, size)
        raise


PROJECT = "sit_vit5"
TENSORBOARD = "tensorboard"


def check_trackers(names: tuple[str, ...]) -> None:
    """Refuses names that accelerate does not know."""
    for name in names:
        choose("trackers", name, LOGGER_TYPE_TO_CLASS)


class Trackers:
    """The trackers of one run, on the main process. `say` prints a line."""

    def __init__(
        self, run: Path, config: TrainConfig, *, first_step: int, say: Callable[[str], None]
    ):
        self.say = say
        self.open: dict[str, GeneralTracker | None] = dict.fromkeys(config.trackers)

        def start(name: str, _: None) -> None:
            self.open[name] = _build(name, run, first_step=first_step)
            with _no_questions():
                self.open[name].start()
            _store_config(name, self.open[name], config, first_step)

        self._each("start", start)

    def log(self, row: dict) -> None:
        """A row of metrics.jsonl; what is None has no point."""
        skip = ("step", "unix_time")
        values = {k: v for k, v in row.items() if k not in skip and v is not None}
        self._each("log", lambda name, tracker: tracker.log(values, step=row["step"]))

    def grid(self, path: Path, step: int) -> None:
        """A picture, by the trackers that take pictures."""
        self._each("log images", lambda name, tracker: _picture(name, tracker, path, step))

    def finish(self) -> None:
        """Writes what is left and closes."""
        self._each("finish", lambda name, tracker: tracker.finish())

    def _each(self, what: str, act: Callable[[str, GeneralTracker], None]) -> None:
        """Does something with every tracker; drops those that fail."""
        for name, tracker in list(self.open.items()):
            try:
                act(name, tracker)
            except ModuleNotFoundError as error:
                self.say(
                    f"note: tracker {name} is off, its package {error.name} is not installed; "
                    "--trackers without a name asks for none"
                )
            except Exception as error:  # of any kind: no key, no network, no disk
                reason = " ".join(str(error).split()) or type(error).__name__
                self.say(f"warning: tracker {name} could not {what} and is off: {reason}")
            else:
                continue
            del self.open[name]


@contextmanager
def _no_questions() -> Iterator[None]:
    """Takes the keyboard away: wandb, without a key, asks for one, and the run would wait."""
    keyboard = sys.stdin
    with open(os.devnull, encoding="utf-8") as sys.stdin:
        try:
            yield
        finally:
            sys.stdin = keyboard


def _build(name: str, run: Path, *, first_step: int) -> GeneralTracker:
    """The tracker, not started yet."""
    tracker_class = LOGGER_TYPE_TO_CLASS[name]
    if name == TENSORBOARD:
        # A resumed run writes the steps after its checkpoint again: the older ones are hidden.
        return tracker_class(TENSORBOARD, run, purge_step=first_step + 1)
    folder = [run] if tracker_class.requires_logging_directory else []
    named = {"wandb": {"name": run.name, "dir": str(run)}, "trackio": {"name": run.name}}
    return tracker_class(PROJECT, *folder, **named.get(name, {}))


def _store_config(name: str, tracker: GeneralTracker, config: TrainConfig, step: int) -> None:
    if name == TENSORBOARD:  # as text: its hparams would add a run in a sub-folder at every resume
        indented = "".join(f"    {line}\n" for line in dump_config(config).splitlines())
        tracker.log({"config": indented}, step=step)
    else:
        scalar = (bool, int, float, str, type(None))
        flat = flatten(to_dict(config))
        tracker.store_init_configuration(
            {k: v if isinstance(v, scalar) else str(v) for k, v in flat.items()}
        )


def _picture(name: str, tracker: GeneralTracker, path: Path, step: int) -> None:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))[None]  # (1, H, W, 3)
    if name == TENSORBOARD:
        tracker.log_images({"samples": pixels}, step=step, dataformats="NHWC")
    elif hasattr(tracker, "log_images"):
        tracker.log_images({"samples": pixels}, step=step)


# A line on the screen that starts so is an event of that kind. (The dump of the configuration
# starts with `model: ` too, but is many lines, which `.` does not match.)
EVENT_LINE = re.compile(
    r"(model|data|batch|precision|warning|note|changed on resume|evaluation|interrupted|done)\b"
    r":? ?(.+)"
)
# Seconds between pages at least, and the share of the time that writing them, which reads all rows,
# takes at most.
PAGE_SECONDS, PAGE_SHARE = 60, 0.01


class RunLog:
    """Writes for one run; built on the main process only.

    cached: whether the data are latents, encoded already.
    """

    def __init__(self, run: Path, config: TrainConfig, *, first_step: int, cached: bool = False):
        self.run, self.config, self.cached = run, config, cached
        self.steps, self.batch_size, self.step = config.steps, config.batch_size, first_step
        self.path, self.files = run / METRICS_FILE, LogFiles(self._print)
        self._drop_after: int | None = first_step
        self._skipped = self._skipped_up_to(first_step)
        self.bar = tqdm(
            total=self.steps, initial=first_step, unit="step", disable=None, leave=False
        )
        self._timed_steps, self._timed_seconds, self._waited = 0, 0.0, 0.0
        self._rows_of_session = 0
        self._next_page, self._page_failed = -math.inf, False
        self.event("resumed" if first_step else "started", f"to run to step {self.steps}")
        self.trackers = Trackers(run, config, first_step=first_step, say=self.say)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.event("failed", str(error) or kind.__name__)
        self.close()

    def say(self, text: str) -> None:
        """A line above the progress bar; an event too, if it starts as one."""
        self._print(text)
        if line := EVENT_LINE.fullmatch(text):
            self.event(line[1], line[2])

    def event(self, kind: str, text: str) -> None:
        """Appends to events.jsonl, which outlives the process and is shown in run.html."""
        row = {"step": self.step, "unix_time": _now(), "kind": kind, "text": text}
        self.files.append(self.run / EVENTS_FILE, row)

    def _print(self, text: str) -> None:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def step_done(self, seconds: float, waited: float) -> None:
        """Counts a training step, its duration without saving and drawing, and how much of it was
        waiting for data."""
        self.step += 1
        self.bar.update(1)
        self._timed_steps += 1
        self._timed_seconds += seconds
        self._waited += waited

    def rewound(self, step: int) -> None:
        """The run went back to a step: what was logged of later ones is taken away."""
        self._drop_after, self._skipped = step, self._skipped_up_to(step)
        self.step = self.bar.n = step
        self.bar.refresh()

    def metrics(
        self,
        *,
        step: int,
        epoch: float,
        images: int,
        loss: float | None,
        grad_norm: float,
        lr: float,
        skipped_steps: int,
    ) -> None:
        """Appends a row to metrics.jsonl and prints it; loss None: every step was skipped.

        Adds images/s since the last row, without the time of saving and drawing.
        """
        seconds_per_step = self._timed_seconds / max(self._timed_steps, 1)
        waiting = self._waited / max(self._timed_seconds, 1e-9)
        self._timed_steps, self._timed_seconds, self._waited = 0, 0.0, 0.0
        rate = self.batch_size / seconds_per_step
        row = {
            "step": step,
            "epoch": round(epoch, 4),
            "images": images,
            "loss": loss,
            "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
            "lr": lr,
            "skipped_steps": skipped_steps,
            "images_per_second": round(rate, 2),
            "data_wait": round(waiting, 3),
            "unix_time": _now(),
        }
        self._append(self.path, row)
        self.trackers.log(row)
        self._rows_of_session += 1
        # In the first interval the loader's processes were still starting.
        if waiting > self.config.watchdog.data_wait and self._rows_of_session > 1:
            advice = (
                "copy the latent cache to a faster disk"
                if self.cached
                else "encode the data once (python -m sit_vit5 encode)"
            )
            self.say(
                f"warning: {waiting:.0%} of the time went on waiting for data; raise "
                f"--data.workers, or {advice}"
            )
        if skipped_steps > self._skipped:
            new = skipped_steps - self._skipped
            self.event("skipped", f"{new} steps, their gradient was not finite or too large")
            self._skipped = skipped_steps
        eta = timedelta(seconds=round(seconds_per_step * (self.steps - step)))
        shown_loss = "not finite" if loss is None else f"{loss:.4f}"
        skipped = f"  skipped {skipped_steps}" if skipped_steps else ""
        self.say(
            f"step {step}/{self.steps}  epoch {epoch:.2f}  loss {shown_loss}  "
            f"grad norm {grad_norm:.3f}  lr {lr:.1e}  {rate:,.0f} images/s{skipped}  ETA {eta}"
        )
        if time.monotonic() > self._next_page:
            self._write_page()

    def evaluated(self, weights: str, values: dict[str, float], *, seconds: float) -> None:
        """Appends a row to evaluations.jsonl: metrics of samples of these weights, by name."""
        row = {
            "step": self.step,
            "weights": weights,
            "values": values,
            "seconds": round(seconds, 1),
            "unix_time": _now(),
        }
        self._append(self.run / EVALUATIONS_FILE, row)
        self.trackers.log({"step": self.step, **values})
        shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        self.say(f"evaluation: step {self.step}, {weights}: {shown} ({seconds:,.0f} s)")

    def show(self, grid: Path) -> None:
        """Gives a grid, if one was drawn, to the trackers; brings run.html up to date."""
        if grid.is_file():
            self.trackers.grid(grid, self.step)
        self._write_page()

    def draw_loss(self) -> None:
        """Redraws loss.png from metrics.jsonl."""
        rows = [row for row in self._rows() if row["loss"] is not None]
        if not rows:
            return
        # Imported here: matplotlib takes a second; Figure needs no display and no global state.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        loss_axis = figure.subplots()
        steps = [row["step"] for row in rows]
        loss_axis.plot(steps, [row["loss"] for row in rows], color="tab:blue", label="loss")
        loss_axis.set(xlabel="step", ylabel="velocity loss (mean over the interval)")
        loss_axis.grid(alpha=0.3)
        norm_axis = loss_axis.twinx()
        norm_axis.plot(steps, [row["grad_norm"] for row in rows], color="tab:orange", alpha=0.5)
        norm_axis.set(ylabel="gradient norm before clipping", yscale="log")
        lines = [*loss_axis.lines, *norm_axis.lines]
        loss_axis.legend(lines, ["loss", "gradient norm"], loc="upper right")
        with replacing(self.run / LOSS_PLOT) as partial:
            figure.savefig(partial, format="png", dpi=110)

    def close(self) -> None:
        """Closes the trackers, writes run.html for good and takes the bar off the screen."""
        self.trackers.finish()
        self._write_page()
        self.bar.close()

    def _write_page(self) -> None:
        if not (self.run / LATEST_FILE).is_file():  # a run without a checkpoint replaces no file
            return
        started = time.monotonic()
        try:
            events = read_rows(self.run / EVENTS_FILE)
            evaluations = read_rows(self.run / EVALUATIONS_FILE)
            write_page(self.run, self.config, self._rows(), events, evaluations)
        except Exception as error:  # of any kind: a page is not worth a run
            if not self._page_failed:
                self.say(f"warning: {self.run / PAGE_FILE} not written: {error}")
            self._page_failed = True
        now = time.monotonic()
        self._next_page = now + max(PAGE_SECONDS, (now - started) / PAGE_SHARE)

    def _append(self, path: Path, row: dict) -> None:
        """Adds a row; the first one after a resume or a rewind takes the place of later ones."""
        if self._drop_after is not None:
            for file in (self.path, self.run / EVALUATIONS_FILE):
                self.files.keep(file, up_to=self._drop_after)
            self._drop_after = None
        self.files.append(path, row)

    def _rows(self) -> list[dict]:
        return read_rows(self.path)

    def _skipped_up_to(self, step: int) -> int:
        """Number of skipped steps in the last row that is not after a step."""
        rows = [row for row in self._rows() if row["step"] <= step]
        return rows[-1].get("skipped_steps", 0) if rows else 0


def _now() -> float:
    return round(time.time(), 1)


def report_bad_images(run: Path, bad: list[str]) -> list[str]:
    """Adds files that could not be decoded to bad_images.txt; a line to say if any was new.

    Every rank appends for itself: a short append is one write and does not mix with another's.
    """
    path = run / BAD_IMAGES
    try:
        known = set(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except FileNotFoundError:
        known = set()
    except OSError as error:
        return [f"warning: {path} not written: {brief(error)}"]
    new = sorted({printable(line) for line in bad} - known)
    if not new:
        return []
    try:
        append_whole(path, "".join(line + "\n" for line in new))
    except (OSError, UserError) as error:
        return [f"warning: {path} not written: {brief(error)}"]
    return [f"warning: {len(known) + len(new)} bad images skipped so far, listed in {path}"]
