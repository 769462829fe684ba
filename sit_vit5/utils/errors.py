"""The error that a user sees: a single line without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake the user can mend. The message says what is wrong, what is allowed, what to do."""


class PathError(UserError):
    """A mistake about a file or folder; a command puts the option that names it before the text."""

    def __init__(self, message: str, path: object):
        super().__init__(message)
        self.path = str(path)


def brief(reason: object, length: int = 200) -> str:
    """A reason or name for a message, in one line, cut: damaged files give megabytes."""
    text = " ".join(str(reason).split())
    if not text and isinstance(reason, Exception):
        return type(reason).__name__
    return text if len(text) <= length else f"{text[:length]}..."


def listed(names: Iterable[str], *, most: int = 8) -> str:
    """Names for a message: "a, b, c and 5 more"; "nothing" if there is none."""
    names = [brief(name, 80) for name in names]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more


def size_text(count: float) -> str:
    """A number of bytes in the unit that says most: "640 bytes", "3.2 MB", "1.24 GB"."""
    for unit, size in (
        ("EB", 1e18),
        ("PB", 1e15),
        ("TB", 1e12),
        ("GB", 1e9),
        ("MB", 1e6),
        ("KB", 1e3),
    ):
        if count >= 0.9995 * size:  # what rounds to 1000 is 1 of the next unit
            return f"{count / size:,.3g} {unit}"
    return f"{count:.0f} bytes"


def index_of(text: str, count: int) -> int | None:
    """The number that a text gives, if it is a position among `count` things."""
    number = int(text) if text.isdecimal() and len(text) < 20 else count
    return number if number < count else None


def nearest(name: str, options: Iterable[str], count: int = 3) -> str:
    """The options that look most like `name`, as text: "lr, eps"; all of a few if none is close."""
    options = list(options)
    by_lower_case = {option.lower(): option for option in options}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=count, cutoff=0.5)
    if close:
        return ", ".join(by_lower_case[match] for match in close)
    return ", ".join(options) if len(options) <= 12 else "none, see --help"


def choose(kind: str, name: str, options: dict) -> object:
    """`options[name]`, or a UserError that names the nearest legal names."""
    if name not in options:
        raise UserError(f"unknown {kind} {name!r}; nearest: {nearest(str(name), options)}")
    return options[name]


def nearest_multiples(number: int, divisor: int) -> str:
    """The multiples on both sides of `number`, as text: "96 or 104"; only positive ones."""
    below = number // divisor * divisor
    return f"{below} or {below + divisor}" if below > 0 else f"{divisor}"
