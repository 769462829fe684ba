"""WebDataset: tar shards in which neighbours of one name are a sample (0001.jpg, 0001.cls).

Once at the start the headers of all members are read; then an image is a place in a file.
Nothing is ever unpacked.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from sit_vit5.data.fingerprints import short_hash, stamp_of
from sit_vit5.data.sources import ImageSource, hash_contents, number_classes
from sit_vit5.data.transforms import EXTENSIONS, BadImage, describe_passed_over, read_rgb
from sit_vit5.utils.distributed import launch_rank
from sit_vit5.utils.errors import UserError, listed
from sit_vit5.utils.files import check_regular_file
from sit_vit5.utils.progress import progress_bar

LABEL = ".cls"
NAME_FILES = ("classes.txt", "classnames.txt")
MEGABYTE = 10**6


@dataclass(frozen=True)
class Member:
    """A file in a tar. key: its path up to the first dot of its name, extension: the rest."""

    key: str
    extension: str
    offset: int
    size: int

    @property
    def name(self) -> str:
        """As in the tar, its extension in lower case."""
        return self.key + self.extension


class Index:
    """Numbers and one text, not objects: a million samples take some 60 MB.

    Of image i: the number of its tar, offset and size of its bytes, its label (-1: none), the end
    of its name in `names`. passed_over: kinds of the members that are neither image nor label.
    """

    def __init__(self) -> None:
        self.tars, self.offsets, self.sizes = array("q"), array("q"), array("q")
        self.labels, self.name_ends = array("q"), array("q")
        self.names = bytearray()
        self.passed_over: Counter[str] = Counter()
        self.first_passed_over = ""

    def add(self, tar: int, image: Member, label: int) -> None:
        self.tars.append(tar)
        self.offsets.append(image.offset)
        self.sizes.append(image.size)
        self.labels.append(label)
        self.names += image.name.encode("utf-8", "surrogateescape")
        self.name_ends.append(len(self.names))

    def pass_over(self, member: Member) -> None:
        self.first_passed_over = self.first_passed_over or member.name
        kind = member.extension.rstrip(".") or "without extension"
        # Of 0001.v2.png too there would be a kind per member.
        self.passed_over[f".*.{kind.rpartition('.')[2]}" if kind.count(".") > 1 else kind] += 1

    def name(self, place: int) -> str:
        start = self.name_ends[place - 1] if place else 0
        return self.names[start : self.name_ends[place]].decode("utf-8", "backslashreplace")


class TarShards(ImageSource):
    """A tar, a folder of tars, or a pattern such as `shards/train-*.tar`.

    Labels are the whole numbers in the `.cls` files. Class names: the lines of `classes.txt` or
    `classnames.txt` beside the tars, else those numbers, of the classes that there are.
    """

    def __init__(self, path: str | Path, image_size: int, *, unconditional: bool = False):
        self.tars = find_tars(Path(path))
        self.index = read_index(self.tars, labelled=not unconditional)
        if not len(self.index.sizes):
            raise UserError(_no_image(path, self.index))
        values, class_names = np.array(self.index.labels), ()
        digest = hashlib.sha256(self.index.names + self.index.sizes.tobytes() + values.tobytes())
        if unconditional:
            values = np.zeros_like(values)
        else:
            class_names = read_names(self.tars[0].parent)
            if class_names is None:
                values, class_names = number_classes(values, str(path))
        super().__init__(
            "webdataset",
            labels=values,
            class_names=class_names,
            channels=3,
            image_size=image_size,
            digest=digest.hexdigest(),
            passed_over=self.index.passed_over,
            contents=hash_contents(map(self.coded, range(len(values))), sum(self.index.sizes)),
        )

    def picture(self, index: int) -> Image.Image:
        return read_rgb(io.BytesIO(self.coded(index)), self.describe(index))

    def coded(self, index: int) -> bytes:
        # Opened each time: with kept handles a thousand shards would pass the limit of open files,
        # and forked processes would share a position.
        try:
            with self.tars[self.index.tars[index]].open("rb") as file:
                file.seek(self.index.offsets[index])
                return file.read(self.index.sizes[index])
        except OSError as error:
            raise BadImage(self.describe(index), str(error)) from None

    def stamp(self, index: int) -> int:
        place = self.index.offsets[index], self.index.sizes[index]
        return short_hash(stamp_of(self.tars[self.index.tars[index]]), place)

    def describe(self, index: int) -> str:
        return f"{self.index.name(index)} in {self.tars[self.index.tars[index]]}"


def find_tars(path: Path) -> list[Path]:
    """The tars that a path means, sorted by name."""
    if path.is_dir():
        found = [file for file in path.glob("*.tar") if file.name[0] != "."]
    else:
        found = [path] if path.exists() else _matches(path)
    found = sorted(file for file in found if not file.is_dir())
    for file in found:
        check_regular_file(file, remedy="fetch the tar or remove it")
    if not found:
        raise UserError(f"{path} is no tar, folder of tars or pattern such as train-*.tar")
    return found


def _matches(pattern: Path) -> list[Path]:
    try:
        return list(pattern.parent.glob(pattern.name))
    except (ValueError, NotImplementedError, IndexError, re.error):  # "**.tar", "", "["
        return []


def read_names(folder: Path) -> tuple[str, ...] | None:
    """The class names in a text file, one per line; None if there is none."""
    for name in NAME_FILES:
        file = folder / name
        if os.path.lexists(file):
            check_regular_file(file, remedy="write one name per line, or remove it")
            try:
                return tuple(file.read_text(encoding="utf-8-sig").splitlines())
            except ValueError:
                raise UserError(f"{file} is not UTF-8 text; save it as UTF-8") from None
    return None


def read_index(tars: list[Path], *, labelled: bool) -> Index:
    """Reads the headers of all members, and the labels if they are wanted."""
    index, done = Index(), 0
    sizes = [tar.stat().st_size for tar in tars]
    bar = progress_bar(
        sum(sizes) // MEGABYTE, unit="MB", title="reading the tars", shown=launch_rank() == 0
    )
    with bar:
        for number, (tar, size) in enumerate(zip(tars, sizes, strict=True)):
            for image, label in samples(tar, labelled=labelled, pass_over=index.pass_over):
                index.add(number, image, label)
                bar.update((done + image.offset) // MEGABYTE - bar.n)
            done += size
    return index


def samples(
    tar: Path, *, labelled: bool, pass_over: Callable[[Member], None]
) -> Iterator[tuple[Member, int]]:
    """The images of a tar in their order, and their labels, -1 if they are not wanted.

    pass_over: called with the members that are neither image nor label.
    """
    seen: set[int] = set()  # hashes: a million names would take 100 MB
    with tar.open("rb") as file:
        there = _parts(members(tar, file), labelled=labelled, pass_over=pass_over)
        for key, group in groupby(there, key=lambda found: found.key):
            parts = list(group)
            images = [part for part in parts if part.extension != LABEL]
            plain = hash("/".join(part for part in key.split("/") if part not in ("", ".")))
            if plain in seen:
                raise UserError(
                    f"{tar}: {images[0].name if images else key} is there twice (tar --append "
                    "replaces nothing); write the tar again with one of them"
                )
            seen.add(plain)
            if len(images) != 1 or len(parts) != 1 + labelled:
                names = listed(part.name for part in parts)
                raise UserError(
                    f"{tar}: {names} is no sample; expected one image"
                    f"{f' and one {LABEL} beside it (tar --sort=name)' if labelled else ''}"
                )
            label = -1
            if labelled:
                (number,) = [part for part in parts if part.extension == LABEL]
                label = read_label(tar, file, number)
            yield images[0], label


def _parts(
    found: Iterator[Member], *, labelled: bool, pass_over: Callable[[Member], None]
) -> Iterator[Member]:
    """Images, and labels if they are wanted."""
    for member in found:
        if member.extension in EXTENSIONS or (labelled and member.extension == LABEL):
            yield member
        elif member.extension != LABEL:
            pass_over(member)


def _no_image(path: str | Path, index: Index) -> str:
    message = f"{path} holds no image (looked for {', '.join(EXTENSIONS)})"
    if index.first_passed_over:
        message += (
            f"; {describe_passed_over(index.passed_over)}, such as {index.first_passed_over}: the "
            "kind of a member is what follows the first dot of its name"
        )
    return message


def read_label(tar: Path, file: BinaryIO, member: Member) -> int:
    """The whole number in a `.cls` member."""
    file.seek(member.offset)
    text = file.read(min(member.size, 32))
    if not re.fullmatch(rb"\s*\d{1,18}\s*", text):
        raise UserError(f"{tar}: {member.name} holds {text!r}; expected a whole number")
    return int(text)


def members(tar: Path, file: BinaryIO) -> Iterator[Member]:
    """The plain files of a tar that are not hidden; unsafe ones are refused by their names."""
    length = tar.stat().st_size
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while (info := archive.next()) is not None:
                archive.members.clear()  # else it keeps an object per member
                # A size below 0 would send tarfile back, for ever.
                if not 0 <= info.size <= length:
                    raise tarfile.ReadError(f"{info.name!r} has the size {info.size}")
                if not info.isdir():
                    yield from _member(tar, info)
            # tarfile takes a damaged header for the end; the end is a block of zeros.
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"no header and no end at byte {archive.offset}")
    except UserError:
        raise
    except (tarfile.TarError, OSError, ValueError, RecursionError) as error:  # on odd headers
        raise UserError(
            f"{tar} is cut short, damaged or compressed ({error}); fetch or unzip it again"
        ) from None


def _member(tar: Path, info: tarfile.TarInfo) -> Iterator[Member]:
    """The member as ours; nothing if it is hidden."""
    parts = info.name.split("/")
    if ".." in parts or not parts[0]:  # no name, or one that begins with /
        raise UserError(f"{tar}: unsafe name {info.name!r}; make the tar with relative names")
    if any(part[:1] == "." and part != "." for part in parts):
        return
    if not info.isreg() or info.issparse():
        raise UserError(
            f"{tar}: {info.name} is a link or another special file; make the tar with plain files "
            "(tar --dereference --hard-dereference)"
        )
    base, dot, extension = parts[-1].partition(".")
    key = "/".join([*parts[:-1], base])
    yield Member(key, dot + extension.lower(), info.offset_data, info.size)
