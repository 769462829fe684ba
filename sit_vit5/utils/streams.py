"""Standard streams that never fail a command: closed, full, broken or of a narrow encoding."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

# Control characters that a name from a data set must not send to the terminal; a report's own line
# breaks and tabs stay.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: object) -> str:
    """One line: characters that cannot be printed, line breaks too, as escapes such as `\\n`."""
    return "".join(map(_escaped, str(text)))


def warn(text: object) -> None:
    """Prints a warning of one line to standard error."""
    print(f"warning: {printable(text)}", file=sys.stderr)


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


class SafeStream:
    """A text stream whose writes never raise: a reader that is gone, or a full disk, loses the
    output and not the work."""

    def __init__(self, stream: TextIO, name: str, *, escape: bool):
        self.stream, self.name, self.escape = stream, name, escape
        self._warned = False

    def write(self, text: str) -> int:
        """Writes the text, with control characters as escapes if `escape` is set."""
        shown = _CONTROL.sub(lambda match: _escaped(match[0]), text) if self.escape else text
        try:
            self.stream.write(shown)
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self._warn(error)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Writes every text of a list."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Passes on what is buffered."""
        try:
            self.stream.flush()
        except (OSError, ValueError) as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        """Says once on standard error that output is lost; a closed pipe is no accident."""
        if self._warned or self is sys.stderr or isinstance(error, (BrokenPipeError, ValueError)):
            return
        self._warned = True
        warn(f"{self.name} cannot be written: {error.strerror}")

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def guard_streams() -> None:
    """Makes sys.stdout and sys.stderr safe to print to, whatever the caller made of them."""
    for descriptor in range(3):
        _open_descriptor(descriptor)
    for name, title, descriptor in (
        ("stdout", "standard output", 1),
        ("stderr", "standard error", 2),
    ):
        stream = getattr(sys, name)
        if isinstance(stream, SafeStream):
            continue
        if stream is None:
            stream = open(descriptor, "w", encoding="utf-8", closefd=False)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, SafeStream(stream, title, escape=name == "stdout"))


def _open_descriptor(descriptor: int) -> None:
    """Keeps a closed descriptor from becoming the next file's, into which libraries would print."""
    try:
        os.fstat(descriptor)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)
        os.set_inheritable(descriptor, True)


def close_streams() -> None:
    """Flushes for the last time: what cannot be written then is dropped, and Python is silent."""
    for stream in (sys.stdout, sys.stderr):
        try:
            getattr(stream, "stream", stream).flush()
        except (OSError, ValueError) as error:
            if isinstance(stream, SafeStream):
                stream._warn(error)
            if isinstance(error, OSError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
