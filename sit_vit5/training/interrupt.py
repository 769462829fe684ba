"""Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal end a run at the next step, after a save."""

from __future__ import annotations

import signal
from types import FrameType

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
