"""Files of JSON lines in a run folder: rows are checked where they are read, and none is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from sit_vit5.errors import UserError, brief
from sit_vit5.files import Count, check_plain, parse_json, write_text
from sit_vit5.run_folder import EVALUATIONS_FILE, EVENTS_FILE, METRICS_FILE

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
