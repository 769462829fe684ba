"""Disk that a training run takes: estimated by the plan, checked before the first step."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from sit_vit5.config import CheckpointConfig, TrainConfig
from sit_vit5.training.snapshots import DTYPE
from sit_vit5.utils.errors import size_text
from sit_vit5.utils.files import check_space

FP32 = 4  # bytes
MOMENTS = 2 * FP32  # AdamW's, of each trained weight


@dataclass(frozen=True)
class RunDisk:
    """Bytes of one checkpoint, of all that are there at one time, of all milestones' averages and
    of all snapshots; the small files are not counted."""

    checkpoint: int
    checkpoints: int
    milestones: int
    snapshots: int

    @property
    def total(self) -> int:
        """At the end of the run, when most is there."""
        return self.checkpoints + self.milestones + self.snapshots


def run_disk(config: TrainConfig, parameters: int, trainable: int) -> RunDisk:
    """Disk space of a run with these numbers of weights and of trainable weights."""
    averages = len(config.ema.names)
    checkpoint = FP32 * parameters * (1 + averages) + MOMENTS * trainable
    return RunDisk(
        checkpoint=checkpoint,
        checkpoints=checkpoint * checkpoints_on_disk(config.checkpoint, config.steps),
        milestones=FP32 * parameters * averages * milestones_on_disk(config),
        snapshots=parameters * DTYPE.itemsize * snapshots_on_disk(config),
    )


def disk_lines(config: TrainConfig, disk: RunDisk) -> list[str]:
    """In words: a line for each kind of file that takes any."""
    keep = config.checkpoint.keep
    kept = f"the newest {keep} and the one being written" if keep else "all of them"
    lines = [
        f"disk: {size_text(disk.checkpoint)} per checkpoint, "
        f"{size_text(disk.checkpoints)} for {kept}",
    ]
    if disk.milestones:
        every = config.checkpoint.milestone_every
        lines.append(
            f"  and {size_text(disk.milestones)} for the averages of every {every:,} steps"
        )
    if disk.snapshots:
        lines.append(f"  and {size_text(disk.snapshots)} for all snapshots of averages")
    return lines


def check_disk(run: Path, config: TrainConfig, disk: RunDisk) -> list[str]:
    """The lines above and what is free. Refuses a disk too small for the checkpoints alone.

    What the run holds already is not needed again.
    """
    held = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
    free = check_space(
        run,
        max(disk.checkpoints - held, 0),
        f"the checkpoints of this run ({size_text(disk.checkpoint)} each)",
        use="free some, choose another --output-dir or a smaller --checkpoint.keep",
    )
    lines = disk_lines(config, disk)
    lines[-1] += f"; {size_text(free)} are free"
    if disk.total - held > free:
        lines.append(
            f"warning: the whole run will take {size_text(disk.total)} of disk, "
            f"{size_text(free)} are free"
        )
    return lines


def checkpoints_on_disk(config: CheckpointConfig, steps: int) -> int:
    """The largest number at one time: those kept, and the next one while it is written."""
    written = _saves(config, steps)
    return written if config.keep == 0 else min(config.keep + 1, written)


def milestones_on_disk(config: TrainConfig) -> int:
    """Number of milestones beyond the newest checkpoints, which are counted in full."""
    if config.checkpoint.keep == 0:
        return 0
    older = max(_saves(config.checkpoint, config.steps) - config.checkpoint.keep, 0)
    # The step of the last of the older ones: the first up to which so many were saved.
    last = bisect_left(
        range(config.steps), older, key=lambda step: _saves_up_to(step, config.checkpoint)
    )
    every = config.checkpoint.milestone_every
    return last // every if every and older else 0


def snapshots_on_disk(config: TrainConfig) -> int:
    """Power-function averages that are written over the run; none is removed."""
    every = config.ema.snapshot_every
    return math.ceil(config.steps / every) * len(config.ema.widths) if every else 0


def _saves(config: CheckpointConfig, steps: int) -> int:
    """Number of checkpoints that are written over a run, the first and the last included."""
    return _saves_up_to(steps - 1, config) + 1


def _saves_up_to(step: int, config: CheckpointConfig) -> int:
    """Number of checkpoints up to a step before the last: step 0 and all multiples, each once."""
    intervals = [every for every in (config.every, config.milestone_every) if every]
    both = step // math.lcm(*intervals) if len(intervals) == 2 else 0
    return 1 + sum(step // every for every in intervals) - both
