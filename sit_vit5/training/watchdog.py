"""Signals and the watchdog: when a run stops, skips a step, or goes back."""

from __future__ import annotations

import math
import signal
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from sit_vit5.config import WatchdogConfig
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.run_folder import last_good_checkpoint

# SIGHUP: the terminal was closed. SIGUSR1: a scheduler's word that time is up. Windows has neither.
STOPPING = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
]


class Interrupt:
    """Remembers the first signal; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.signal = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        for number in STOPPING:
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number


HISTORY = 128  # norms of good steps that the median is taken of
ENOUGH = 32  # of them, before a spike can be told
SKIPPING = ("skip", "rewind")  # the ways to meet a spike that leave the weights alone


@dataclass
class Watchdog:
    """Counts skipped steps; `skipped` over the run, `in_a_row` until a good step.

    max_in_a_row: of skipped steps, and of steps with a gradient of zero. norms: of the last good
    steps, oldest first. rewinds: how often the run went back. bad_data: images that are not finite
    in the skipped steps in a row; unreported: since the last report; data_check: a command that
    finds them all. action: rewind or stop, once one is due; why: of what step.
    """

    max_in_a_row: int
    config: WatchdogConfig
    skipped: int = 0
    in_a_row: int = 0
    zeros: int = 0
    rewinds: int = 0
    norms: list[float] = field(default_factory=list)
    spikes: list[str] = field(default_factory=list)
    bad_data: list[str] = field(default_factory=list)
    unreported: list[str] = field(default_factory=list)
    data_check: str = ""
    action: str | None = None
    why: str = ""

    def limit(self) -> float:
        """The gradient norm above which a step leaves the weights alone."""
        return self._threshold() if self.config.on_spike in SKIPPING else math.inf

    def accepts(self, step: int, grad_norm: float, bad_data: Sequence[str] = ()) -> bool:
        """True if step `step` (from 0) counts: its norm is finite and below `limit`.

        bad_data: images of the step that are not finite.
        """
        finite, spike = math.isfinite(grad_norm), grad_norm > self._threshold()
        counts = finite and not (spike and self.config.on_spike in SKIPPING)
        self.skipped += not counts
        self.in_a_row = 0 if counts else self.in_a_row + 1
        self.zeros = self.zeros + 1 if grad_norm == 0 else 0
        self.bad_data = [] if counts else [*self.bad_data, *bad_data]
        self.unreported += bad_data
        if not finite:
            because = f", since {_not_finite(bad_data)}" if bad_data else ""
            why = f"the gradient of step {step + 1} is not finite{because}"
            self._act(self.config.on_nonfinite, why)
        elif spike:
            self.spikes.append(f"{grad_norm:.3g} at step {step + 1}")
            self._act(
                self.config.on_spike,
                f"the gradient norm {grad_norm:.3g} of step {step + 1} is over "
                f"{self.config.spike:g} times the median of the steps before",
            )
        else:
            self.norms = [*self.norms, grad_norm][-HISTORY:]
        return counts

    def check(self, step: int, run: Path) -> None:
        """Stops a run that learns nothing, or was told to stop."""
        fault = self._fault(step)
        if fault is not None:  # only then is the disk asked: this is called at every step
            what, advice = fault
            last = last_good_checkpoint(run)
            raise UserError(f"{what}; last good checkpoint: {last}; {advice}")

    def report(self) -> list[str]:
        """Warnings on the steps since the last report."""
        lines = []
        if self.unreported:
            bad = _not_finite(self.unreported)
            lines.append(f"warning: steps are skipped, since {bad}; {self.data_check}")
        if self.spikes:
            skipped = self.config.on_spike in SKIPPING
            what = "did not change the weights" if skipped else "was only noted"
            lines.append(
                f"warning: {len(self.spikes)} gradient norms were over {self.config.spike:g} times "
                f"their median, the last {self.spikes[-1]}; it {what} (--watchdog.on-spike)"
            )
        self.spikes, self.unreported = [], []
        return lines

    def _fault(self, step: int) -> tuple[str, str] | None:
        """Why the run must stop, and what to do."""
        bad, lower = self.bad_data, "resume it with a lower optimizer.lr"
        if self.in_a_row >= self.max_in_a_row:
            because = f"; {_not_finite(bad)}" if bad else ""
            advice = "lower optimizer.lr, lower optimizer.clip-norm or use --precision fp32"
            return (
                f"loss or gradient was not finite or too large {self.in_a_row} steps in a row, up "
                f"to step {step}; the weights were left alone{because}",
                self.data_check if bad else advice,
            )
        if self.zeros >= self.max_in_a_row:
            return (
                f"the gradient was exactly zero {self.zeros} steps in a row, up to step {step}: "
                "nothing is learned",
                "resume an older checkpoint with a lower optimizer.lr",
            )
        if self.action == "stop":
            return self.why, self.data_check if bad else lower
        if self.action == "rewind" and self.rewinds >= self.config.max_rewinds:
            return f"{self.why}, after {self.rewinds} rewinds", self.data_check if bad else lower
        return None

    def _act(self, action: str, why: str) -> None:
        if action in ("rewind", "stop"):
            self.action, self.why = action, why

    def _threshold(self) -> float:
        """The norm above which a step is a spike."""
        if self.config.spike == 0 or len(self.norms) < ENOUGH:
            return math.inf
        return self.config.spike * statistics.median(self.norms)


def _not_finite(names: Sequence[str]) -> str:
    """Images in words: the first few."""
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{'; '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'} not finite"
