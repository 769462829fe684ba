"""The one error type that a user sees: a single line without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake the user can mend. The message says what is wrong, what is allowed, what to do."""


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
