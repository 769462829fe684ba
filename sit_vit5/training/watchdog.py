"""Looks at every step's gradient norm: which steps count, and when a run stops or goes back.

All ranks see the same norm, since gradients are averaged before it; so all of them decide alike.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from sit_vit5.config import WatchdogConfig
from sit_vit5.errors import UserError
from sit_vit5.run_folder import last_good_checkpoint

HISTORY = 128  # norms of good steps that the median is taken of
ENOUGH = 32  # of them, before a spike can be told
SKIPPING = ("skip", "rewind")  # the ways to meet a spike that leave the weights alone


@dataclass
class Watchdog:
    """Counts skipped steps; `skipped` over the run, `in_a_row` until a good step.

    max_in_a_row: of skipped steps, and of steps with a gradient of zero. norms: of the last good
    steps, oldest first. rewinds: how often the run went back. action: rewind or stop, once one is
    due; why: of what step.
    """

    max_in_a_row: int
    config: WatchdogConfig
    skipped: int = 0
    in_a_row: int = 0
    zeros: int = 0
    rewinds: int = 0
    norms: list[float] = field(default_factory=list)
    spikes: list[str] = field(default_factory=list)
    action: str | None = None
    why: str = ""

    def limit(self) -> float:
        """The gradient norm above which a step leaves the weights alone."""
        return self._threshold() if self.config.on_spike in SKIPPING else math.inf

    def accepts(self, step: int, grad_norm: float) -> bool:
        """Whether step `step` (from 0) counted: its norm was finite and below `limit`."""
        finite, spike = math.isfinite(grad_norm), grad_norm > self._threshold()
        counts = finite and not (spike and self.config.on_spike in SKIPPING)
        self.skipped += not counts
        self.in_a_row = 0 if counts else self.in_a_row + 1
        self.zeros = self.zeros + 1 if grad_norm == 0 else 0
        if not finite:
            self._act(self.config.on_nonfinite, f"the gradient of step {step + 1} is not finite")
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
        """What to say of the steps since the last report."""
        spikes, self.spikes = self.spikes, []
        if not spikes:
            return []
        skipped = self.config.on_spike in SKIPPING
        what = "did not change the weights" if skipped else "was only noted"
        return [
            f"warning: {len(spikes)} gradient norms were over {self.config.spike:g} times their "
            f"median, the last {spikes[-1]}; it {what} (--watchdog.on-spike)"
        ]

    def _fault(self, step: int) -> tuple[str, str] | None:
        """Why the run must stop, and what to do."""
        lower = "resume it with a lower optimizer.lr"
        if self.in_a_row >= self.max_in_a_row:
            return (
                f"loss or gradient was not finite or too large {self.in_a_row} steps in a row, up "
                f"to step {step}; the weights were left alone",
                "lower optimizer.lr, lower optimizer.clip-norm or use --precision fp32",
            )
        if self.zeros >= self.max_in_a_row:
            return (
                f"the gradient was exactly zero {self.zeros} steps in a row, up to step {step}: "
                "nothing is learned",
                "resume an older checkpoint with a lower optimizer.lr",
            )
        if self.action == "stop":
            return self.why, lower
        if self.action == "rewind" and self.rewinds >= self.config.max_rewinds:
            return f"{self.why}, after {self.rewinds} rewinds", lower
        return None

    def _act(self, action: str, why: str) -> None:
        if action in ("rewind", "stop"):
            self.action, self.why = action, why

    def _threshold(self) -> float:
        """The norm above which a step is a spike."""
        if self.config.spike == 0 or len(self.norms) < ENOUGH:
            return math.inf
        return self.config.spike * statistics.median(self.norms)
