"""Skips steps whose gradient is not finite, and stops a run that has nothing else left."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sit_vit5.errors import UserError
from sit_vit5.run_folder import last_good_checkpoint


@dataclass
class Watchdog:
    """Counts skipped steps; `skipped` over the run, `in_a_row` until a good step."""

    max_in_a_row: int
    skipped: int = 0
    in_a_row: int = 0

    def accepts(self, grad_norm: float) -> bool:
        """Whether the step may update the weights."""
        if math.isfinite(grad_norm):
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += 1
        return False

    def check(self, step: int, run: Path) -> None:
        """Stops the run after too many skipped steps in a row."""
        if self.in_a_row >= self.max_in_a_row:
            raise UserError(
                f"loss or gradient was not finite {self.in_a_row} steps in a row, up to step "
                f"{step}; the weights were left alone; last good checkpoint: "
                f"{last_good_checkpoint(run)}; lower optimizer.lr, lower optimizer.clip-norm or "
                "use --precision fp32"
            )
