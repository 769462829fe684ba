"""Where a run keeps its files, and how a path given by a user leads to a checkpoint.

    runs/NAME/config.yaml  metrics.jsonl  evaluations.jsonl  events.jsonl  loss.png  run.html
              latest  samples/step_0001000.png  checkpoints/step_0001000/  tensorboard/
              ema_snapshots/

`latest` is a text file that holds the path, relative to it, of the newest complete checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path

from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import read_json

CONFIG_FILE = "config.yaml"
STATE_FILE = "state.json"
LATEST_FILE = "latest"
CHECKPOINTS = "checkpoints"
SAMPLES = "samples"
SNAPSHOTS = "ema_snapshots"
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
PAGE_FILE = "run.html"
LOSS_PLOT = "loss.png"
BAD_IMAGES = "bad_images.txt"
# In the folder of a sample set: its images, what made them, and the images while they are made.
ARCHIVE = "samples.npz"
MANIFEST = "samples.json"
PARTIAL = "samples.partial"

_STEP_FOLDER = re.compile(r"step_(\d+)")


def step_name(step: int) -> str:
    """`step_0001000`: sorts as text up to ten million steps; code sorts by number."""
    return f"step_{step:07d}"


def checkpoint_steps(run: Path) -> dict[int, Path]:
    """The complete checkpoints of a run by step, in numeric order."""
    found = {}
    for folder in (run / CHECKPOINTS).glob("step_*"):
        match = _STEP_FOLDER.fullmatch(folder.name)
        if match and (folder / STATE_FILE).is_file():
            found[int(match[1])] = folder
    return dict(sorted(found.items()))


def latest_name(run: Path) -> str:
    """Name of the checkpoint that `latest` points to; empty without one."""
    pointer = run / LATEST_FILE
    if not pointer.is_file():
        return ""
    return Path(pointer.read_text(encoding="utf-8", errors="replace").strip()).name


def has_latest(run: Path, step: int) -> bool:
    """Whether `latest` points to a complete checkpoint of this step."""
    name = step_name(step)
    return latest_name(run) == name and (run / CHECKPOINTS / name / STATE_FILE).is_file()


def last_good_checkpoint(run: Path) -> str:
    """The newest complete checkpoint saved after a good step, for messages; "none" without one."""
    for folder in reversed(checkpoint_steps(run).values()):
        try:
            state = read_json(folder / STATE_FILE)
        except UserError:
            continue
        if not state.get("skipped_in_a_row"):
            return str(folder)
    return "none"


def run_of(checkpoint: Path) -> Path:
    """The run folder of a checkpoint folder; a checkpoint that stands alone is its own."""
    if checkpoint.parent.name == CHECKPOINTS:
        return checkpoint.parents[1]
    whole = checkpoint.resolve()  # the path may start inside the run folder
    return whole.parents[1] if whole.parent.name == CHECKPOINTS else checkpoint


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint folder behind a run folder, its file `latest`, or a checkpoint folder."""
    path = Path(path)
    if (path / STATE_FILE).is_file():
        return path
    run = path.parent if path.name == LATEST_FILE else path
    target = run / CHECKPOINTS / latest_name(run)
    if (target / STATE_FILE).is_file():
        return target
    complete = list(checkpoint_steps(run).values())
    if complete:  # a kill came before the pointer was written; folders are renamed whole
        return complete[-1]
    if path.exists():
        raise UserError(
            f"{path} is no checkpoint: expected a folder with {STATE_FILE}, or a run folder with a "
            "complete checkpoint in it"
        )
    raise UserError(f"checkpoint {path} does not exist; give a run folder such as runs/digits")
