"""Files that are either whole or absent: temporary name, fsync, rename."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from annotated_types import Ge, Le
from filelock import FileLock, Timeout

from sit_vit5.utils.errors import PathError, UserError, brief, size_text

if TYPE_CHECKING:
    from PIL.Image import Image
    from pydantic import TypeAdapter


Value = TypeVar("Value")
# Numbers in JSON files of ours; beyond these limits a file is damaged.
Count = Annotated[int, Ge(0), Le(10**12)]
Size = Annotated[int, Ge(1), Le(2**16)]


def sync(path: Path) -> None:
    """Forces a file or folder to the disk (folders only where the system lets them be opened)."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_plain(path: Path) -> None:
    """Refuses to write where a link, pipe, device or folder is; a file that is absent is fine.

    Whoever opens a file of ours for writing asks first: bytes written through a link end up in
    another file. A hard link is one too.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(found.st_mode):
        kind = "a link to another file"
    elif not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or another special file"
    elif found.st_nlink > 1:
        kind = "a hard link to another file"
    else:
        return
    raise PathError(f"cannot write {path}: it is {kind}; remove it or choose another folder", path)


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """The name of a temporary file, which becomes `path` in one step if the block ends well.

    Makes its folder. A reader sees the old content or the new; on an error the old one stays. A
    link at `path` is replaced, the file that it leads to is untouched. durable: on the disk when
    the block ends.
    """
    partial = path.with_name(path.name + ".partial")
    if path.exists() and not path.is_file():
        check_plain(path.resolve())
    if partial.is_symlink() or (partial.exists() and not partial.is_file()):
        check_plain(partial)
    partial.unlink(missing_ok=True)  # left by a kill
    with _made(path.parent):
        try:
            yield partial
            if durable:
                sync(partial)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    if durable:
        sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by `text` in one step: a reader sees the old content or the new.

    File names may hold bytes that are not UTF-8; they are written escaped.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def save_image(path: Path, image: Image, **options: object) -> None:
    """Replaces `path` by an image in one step, in the format of its extension."""
    with replacing(path, durable=False) as partial:
        image.save(partial, format=path.suffix[1:], **options)


def remove_own(folder: Path, names: Iterable[str]) -> None:
    """Removes the files with these names (or patterns), then the folder if nothing else is in it.

    A link instead of the folder is left alone.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    for file in list(folder.iterdir()):
        if any(fnmatch(file.name, name) for name in names) and not file.is_dir():
            file.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def write_json(path: Path, value: dict) -> None:
    """Writes `value` as indented JSON in one step; a list of numbers stays on one line."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    # Bytes of a file name that are not UTF-8: as escapes of JSON no reader would take them.
    text = re.sub("[\ud800-\udfff]", lambda found: rf"\\u{ord(found[0]):x}", text)
    text = re.sub(r"\[[-+\d.,eE\s]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    write_text(path, text + "\n")


def read_json(path: Path, kind: type[Value] = dict, *, remedy: str = "") -> Value:
    """The JSON value of a file, checked against a type.

    kind: dict, or a dataclass whose annotations are enforced strictly: no number for a text, no 1.0
    for an integer, ranges by `Annotated[int, Ge(1)]`. Unknown keys are ignored.
    remedy: what to do if the file is damaged, such as "use another checkpoint of the run".
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError(0, "it is a pipe or another special file")  # it may never end
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, ValueError) else error.strerror
        raise UserError(damaged(path, reason, remedy)) from None
    return parse_json(text, kind, source=path, remedy=remedy)


def parse_json(text: str, kind: type[Value] = dict, *, source: object, remedy: str = "") -> Value:
    """JSON text checked as by `read_json`. source: where it was found, for the error."""
    from pydantic import ValidationError

    try:
        # Twice, since pydantic takes NaN and Infinity, which are not JSON.
        json.loads(text, parse_constant=_refuse_constant)
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        reason = ": ".join(filter(None, [where, first["msg"]]))
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise UserError(damaged(source, reason, remedy))


@cache
def _adapter(kind: type) -> TypeAdapter:
    """The check of a type, which takes longer to build than to use."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def check_regular_file(path: Path, *, remedy: str = "") -> None:
    """Refuses what opens without being the file that is meant, without reading it.

    A pipe, which would wait forever; an empty file; and what downloads leave in a file's place: a
    pointer of Git LFS (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md) or a web page.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            with path.open("rb") as file:
                start = file.read(512)
    except OSError as error:
        raise UserError(damaged(path, error.strerror, remedy)) from None
    reason = ""
    if stat.S_ISFIFO(mode):
        reason = "it is a pipe"
    elif not stat.S_ISREG(mode):
        reason = "it is a folder" if stat.S_ISDIR(mode) else "it is no regular file"
    elif not path.stat().st_size:
        reason = "it is empty"
    elif placeholder(start):
        reason, remedy = placeholder(start)
    if reason:
        raise UserError(damaged(path, reason, remedy))


def placeholder(start: bytes) -> tuple[str, str] | None:
    """What a download left in a file's place, by its first bytes, and the remedy; None: nothing."""
    start = start[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS, not the file", "fetch it with git lfs pull"
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "it is a web page, not the file", "download the file itself"
    return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def damaged(source: object, reason: str, remedy: str) -> str:
    """The message for a file that cannot be used."""
    return f"{source} cannot be read: {brief(reason)}" + (f"; {remedy}" if remedy else "")


def file_hash(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()


def check_output(path: Path) -> None:
    """Says now, before hours of work, if a file cannot be written; changes nothing."""
    if path.exists() and not path.is_file():
        check_plain(path.resolve())
    check_folder_can_be_made(path.parent)


def check_folder_can_be_made(folder: Path) -> None:
    """Refuses a folder that can be neither written to nor made, without making it."""
    for existing in (folder, *folder.absolute().parents):
        try:
            mode = existing.stat().st_mode
        except FileNotFoundError:
            if existing.is_symlink():
                raise PathError(
                    f"cannot write {folder}: {existing} is a link to nothing; remove it", folder
                ) from None
            continue
        if not stat.S_ISDIR(mode):
            raise PathError(
                f"cannot write {folder}: {existing} is a file; choose another folder", folder
            )
        if not os.access(existing, os.W_OK):
            raise PathError(
                f"cannot write {folder}: {existing} is read-only; choose another folder", folder
            )
        return


def check_apart(out: Path, data: str | None) -> None:
    """Refuses to write into the data folder: what is written would replace data or become some."""
    if data is not None and Path(data).is_dir():
        if out.resolve().is_relative_to(Path(data).resolve()):
            raise UserError(f"out {out} lies in the data folder {data}; choose a place beside it")


def check_new_folder(target: Path) -> None:
    """Refuses a target that exists or cannot be written, before minutes of reading."""
    if target.exists():
        raise PathError(f"{target} exists; choose another folder or remove it", target)
    check_output(target)


def check_space(folder: Path, need: int, what: str, *, use: str) -> int:
    """Refuses a disk with less than `need` free bytes; returns how many are free.

    folder: may not exist yet; use: what the user can do.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < need:
        raise UserError(
            f"{what} need {size_text(need)}, {existing} has {size_text(free)} free; {use}"
        )
    return free


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A name to make a folder under; renamed to `target` if the block ends well, else removed."""
    check_new_folder(target)
    # A name that no user's folder has: one left by a kill is removed.
    partial = target.with_name(f".{target.name}.sit_vit5_partial")
    if partial.is_symlink():
        check_plain(partial)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with _made(target.parent):
            yield partial
            os.replace(partial, target)
            sync(target.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = error.strerror or error
        raise PathError(
            f"cannot write {target}: {reason}; free disk space or choose another folder", target
        ) from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def lock(folder: Path, what: str) -> Iterator[None]:
    """Holds a folder while the context lasts, or says that another process has it.

    Makes the folder; if the block fails before anything is in it, it is removed again.
    """
    check_folder_can_be_made(folder)
    file = folder / ".lock"
    with _made(folder):
        check_plain(file)
        if file.exists() and file.stat().st_size:  # it would be emptied
            raise PathError(f"{file} is not a lock of ours; choose another folder", file)
        held = FileLock(file)
        try:
            held.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"{folder} is in use by another {what}; wait for it or stop it"
            ) from None
        try:
            yield
        except BaseException:
            if not any(path != file for path in folder.iterdir()):
                file.unlink(missing_ok=True)
            raise
        finally:
            held.release()


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """A block with a folder and its parents; those made for it go if it leaves them empty."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # one that is not empty
            for path in made:
                path.rmdir()
        raise


def check_unused(folder: Path, what: str) -> None:
    """Refuses a folder that another process holds; leaves nothing in it."""
    if (folder / ".lock").is_file():
        with suppress(OSError), lock(folder, what):
            pass


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
