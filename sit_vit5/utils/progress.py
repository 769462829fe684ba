"""Progress bars: live on a terminal, a line a minute in a log file."""

from __future__ import annotations

import sys

from tqdm import tqdm

LOG_INTERVAL = 60  # seconds


def progress_bar(total: int, *, unit: str, title: str = "", shown: bool = True) -> tqdm:
    """A bar with rate and ETA that leaves nothing behind; shown False: it only counts."""
    live = sys.stderr.isatty()
    return tqdm(
        total=total,
        desc=title or None,
        unit=unit,
        disable=not shown,
        leave=False,
        delay=0 if live else LOG_INTERVAL,
        mininterval=0.1 if live else LOG_INTERVAL,
    )
