"""What a run tells to TensorBoard and others, by accelerate's tracker classes.

A tracker is worth no run: one that is not installed, has no key or fails at any time is dropped
with one line (row K1). metrics.jsonl does not depend on any of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from PIL import Image

from sit_vit5.cli import dump_config, flatten, to_dict
from sit_vit5.config import TrainConfig
from sit_vit5.errors import choose

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
