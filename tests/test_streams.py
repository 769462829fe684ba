"""Standard streams that are closed, full, broken or narrow: a command works all the same."""

from __future__ import annotations

import errno
import io
import subprocess
import sys

import pytest
from helpers import ROOT

from sit_vit5.config.parse import run
from sit_vit5.utils.errors import PathError, UserError
from sit_vit5.utils.streams import SafeStream, guard_streams, printable


class Failing(io.StringIO):
    """A stream on a full disk (ENOSPC), or whose reader is gone (EPIPE)."""

    def __init__(self, code: int):
        super().__init__()
        self.code = code

    def write(self, text: str) -> int:
        raise OSError(self.code, "cannot write")


def exit_status(main) -> int:
    with pytest.raises(SystemExit) as stop:
        run(main)
    return stop.value.code


@pytest.fixture
def streams(monkeypatch):
    """Sets sys.stdout and sys.stderr for the test."""

    def set_streams(out, err) -> None:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)

    return set_streams


def narrow() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="cp1251")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EPIPE, errno.EFBIG])
def test_command_outlives_a_stdout_that_fails(streams, code):
    errors = io.StringIO()
    streams(Failing(code), errors)
    done = []

    def main(argv: list[str]) -> None:
        print("a report")
        print("another")
        done.append(True)

    assert exit_status(main) == 0 and done
    lost = "" if code == errno.EPIPE else "warning: standard output cannot be written: cannot write"
    assert errors.getvalue().strip() == lost


def test_command_outlives_closed_streams(streams):
    streams(None, None)
    assert exit_status(lambda argv: print("a report", file=sys.stderr)) == 0


def test_error_is_reported_by_its_status_where_stderr_is_closed(streams):
    def main(argv: list[str]) -> None:
        raise UserError("steps 0 must be at least 1")

    streams(io.StringIO(), None)
    assert exit_status(main) == 2


def test_text_that_the_encoding_lacks_is_escaped(streams):
    out, err = narrow(), narrow()
    streams(out, err)

    def main(argv: list[str]) -> None:
        print("class ü, file \udcff")
        raise UserError("no class ü")

    assert exit_status(main) == 2
    assert out.buffer.getvalue().decode("cp1251").split() == ["class", r"\xfc,", "file", r"\udcff"]
    assert err.buffer.getvalue().decode("cp1251").strip() == r"error: no class \xfc"


def test_messages_stay_one_line_without_control_characters(streams):
    errors = io.StringIO()
    streams(io.StringIO(), errors)

    def main(argv: list[str]) -> None:
        raise UserError("no images in a\nerror: b\r\x1b[31m\u202e")

    assert exit_status(main) == 2
    assert errors.getvalue() == "error: no images in a\\nerror: b\\r\\x1b[31m\\u202e\n"


def test_names_cannot_send_escape_codes_to_the_terminal():
    out = io.StringIO()
    print("a\x1b[8m\x9b\tb\nü", file=SafeStream(out, "standard output", escape=True))
    assert out.getvalue() == "a\\x1b[8m\\x9b\tb\nü\n"


def test_printable_text_keeps_letters_of_every_script():
    assert printable("größe 数字 ~/runs") == "größe 数字 ~/runs"


def test_streams_are_guarded_once(streams):
    streams(io.StringIO(), io.StringIO())
    guard_streams()
    guarded = sys.stdout
    guard_streams()
    assert sys.stdout is guarded


def test_files_do_not_take_the_descriptor_of_a_closed_stream(tmp_path):
    code = (
        "import os, sys\n"
        "from sit_vit5.config.parse import run\n"
        "def main(argv):\n"
        f"    with open({str(tmp_path / 'file')!r}, 'w') as file:\n"
        "        os.write(1, b'from a library')\n"
        "        print('a report')\n"
        "        return 3 if file.fileno() > 2 else 4\n"
        "run(main)\n"
    )
    closed = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(closed, cwd=ROOT).returncode == 3
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize(
    ("argv", "error", "line"),
    [
        (["--out", "a"], FileExistsError(errno.EEXIST, "exists", "a"), "--out: a: it is a file;"),
        (["--out=a/b"], OSError(errno.ELOOP, "loop", "a"), "--out: a: its links lead to one"),
        (["--to", "a"], OSError(errno.ENAMETOOLONG, "long", "a/b"), "--to: a/b: the name is too"),
        (["--out", "b"], FileNotFoundError(errno.ENOENT, "no", "a"), "a: it does not exist"),
        ([], OSError(errno.ENOSPC, "No space left"), "No space left: the disk is full; free"),
        (["--out", "a"], PathError("cannot write a", "a"), "--out: cannot write a"),
        (["--checkpoint", "a"], PathError("cannot write a/b", "a/b"), "cannot write a/b"),
    ],
)
def test_system_errors_name_the_option_and_what_to_do(streams, monkeypatch, argv, error, line):
    errors = io.StringIO()
    streams(io.StringIO(), errors)
    monkeypatch.setattr(sys, "argv", ["command", *argv])

    def main(argv: list[str]) -> None:
        raise error

    assert exit_status(main) == 2
    assert errors.getvalue().startswith(f"error: {line}")
    assert errors.getvalue().count("\n") == 1
