"""Ctrl-C and SIGTERM end a run at the next step boundary, so that it can save."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupt:
    """Remembers the first signal; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.signal = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
