"""Averages chosen after training: `python -m sit_vit5 posthoc-ema --run RUN --width 0.13 --to DIR`.

Writes a checkpoint whose averaged weights are the combination of the run's snapshots nearest to a
power-function average of that width.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sit_vit5.config import TrainConfig
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.power_ema import Profile, combine
from sit_vit5.utils.run_folder import SNAPSHOTS
from sit_vit5.utils.streams import warn

if TYPE_CHECKING:
    from sit_vit5.models.checkpoint import State


# 16 snapshots of widths 0.05 and 0.1 each reach 0.03 to 0.25 within it, 4 of each 0.04 to 0.14.
POOR_MATCH = 0.1
GRID = [number / 100 for number in range(1, 29)]


def choose_step(stored: list[Profile], step: int | None, *, up_to: int, folder: Path) -> int:
    """The step asked for, or the newest; refuses one without snapshots."""
    steps = sorted({profile.step for profile in stored if profile.step <= up_to})
    if not steps:
        raise UserError(
            f"{folder / SNAPSHOTS} holds no snapshot up to step {up_to}; train with --ema.widths "
            "0.05 0.1 --ema.snapshot-every N"
        )
    if step is not None and step not in steps:
        near = sorted(sorted(steps, key=lambda other: abs(other - step))[:3])
        raise UserError(
            f"step {step} has no snapshot up to step {up_to} in {folder / SNAPSHOTS}; nearest: "
            f"{', '.join(map(str, near))}"
        )
    return steps[-1] if step is None else step


def report(width: float, step: int, stored: list[Profile], residual: float) -> None:
    """Prints how well the snapshots match the width; if badly, the widths that they reach."""
    count = len(stored)
    print(f"width {width} at step {step}: profile matched to {residual:.2%} by {count} snapshots")
    if residual > POOR_MATCH:
        matches = {other: combine(stored, Profile(step, other)).residual for other in GRID}
        reached = [other for other, match in matches.items() if match <= POOR_MATCH]
        choice = f"{reached[0]} to {reached[-1]}" if reached else "one nearer to the run's widths"
        warn(
            f"{count} snapshots cannot represent width {width} (mismatch above {POOR_MATCH:.0%}); "
            f"choose {choice}, or a later step"
        )


def state_at(state: State, step: int, config: TrainConfig) -> State:
    """The state of the run's checkpoint, moved to another step."""
    return replace(
        state,
        step=step,
        images_seen=step * config.batch_size,
        skipped_steps=0,
        skipped_in_a_row=0,
    )


def with_width(config: TrainConfig, width: float) -> TrainConfig:
    """The configuration of a checkpoint that holds this average alone."""
    return replace(config, ema=replace(config.ema, decays=(), widths=(width,)))
