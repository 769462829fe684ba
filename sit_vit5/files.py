"""Files that are either whole or absent: temporary name, fsync, rename."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from sit_vit5.errors import UserError

Value = TypeVar("Value")


def sync(path: Path) -> None:
    """Forces a file or folder to the disk (folders only where the system lets them be opened)."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by `text` in one step: a reader sees the old content or the new."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)


def write_json(path: Path, value: dict) -> None:
    """Writes `value` as indented JSON in one step; a list of numbers stays on one line."""
    text = json.dumps(value, indent=2, allow_nan=False)
    text = re.sub(r"\[[-+\d.,eE\s]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    write_text(path, text + "\n")


def read_json(path: Path, kind: type[Value] = dict, *, remedy: str = "") -> Value:
    """The JSON value of a file, checked against a type.

    kind: dict, or a dataclass whose annotations are enforced strictly: no number for a text, no 1.0
    for an integer, ranges by `Annotated[int, Ge(1)]`. Unknown keys are ignored.
    remedy: what to do if the file is damaged, such as "use another checkpoint of the run".
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, ValueError) else error.strerror
        raise UserError(_damaged(path, reason, remedy)) from None
    return parse_json(text, kind, source=path, remedy=remedy)


def parse_json(text: str, kind: type[Value] = dict, *, source: object, remedy: str = "") -> Value:
    """JSON text checked as by `read_json`. source: where it was found, for the error."""
    from pydantic import TypeAdapter, ValidationError

    try:
        # Twice, since pydantic takes NaN and Infinity, which are not JSON.
        json.loads(text, parse_constant=_refuse_constant)
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        reason = ": ".join(filter(None, [where, first["msg"]]))
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise UserError(_damaged(source, reason, remedy))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _damaged(source: object, reason: str, remedy: str) -> str:
    """The message for a file that cannot be used; a damaged file must not flood the terminal."""
    reason = " ".join(reason.split())
    if len(reason) > 200:
        reason = f"{reason[:200]}..."
    return f"{source} cannot be read: {reason}" + (f"; {remedy}" if remedy else "")


def file_hash(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()


def check_output(path: Path) -> None:
    """Makes the folder of a file to be written; says now, before hours of work, if it cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"cannot write {path}: it is a folder, or its folder is read-only")


def check_new_folder(target: Path) -> None:
    """Refuses a target that exists or cannot be written, before minutes of reading."""
    if target.exists():
        raise UserError(f"{target} exists; choose another folder or remove it")
    check_output(target)


def check_space(folder: Path, need: int, what: str, *, use: str) -> int:
    """Refuses a disk with less than `need` free bytes; returns how many are free.

    folder: may not exist yet; use: what the user can do.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < need:
        raise UserError(
            f"{what} need {need / 1e9:.1f} GB, {existing} has {free / 1e9:.1f} GB free; {use}"
        )
    return free


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A name to make a folder under; renamed to `target` if the block ends well, else removed."""
    check_new_folder(target)
    # A name that no user's folder has: one left by a kill is removed.
    partial = target.with_name(f".{target.name}.sit_vit5_partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        os.replace(partial, target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def lock(folder: Path, what: str) -> Iterator[None]:
    """Holds a folder while the context lasts, or says that another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    held = FileLock(folder / ".lock")
    try:
        held.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{folder} is in use by another {what}; wait for it or stop it") from None
    try:
        yield
    finally:
        held.release()


def check_same(folder: Path, before: dict, now: dict, *, what: str) -> None:
    """Refuses to go on in a folder that holds what other settings made; names their changes."""
    before, now = _flat(before), _flat(now)
    changed = [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise UserError(
            f"{folder} holds {what} with other settings ({'; '.join(changed)}); choose another "
            "--out"
        )


def _flat(settings: dict, prefix: str = "") -> dict:
    """Nested settings as one level: `sampler.steps`."""
    flat = {}
    for key, value in settings.items():
        nested = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat
