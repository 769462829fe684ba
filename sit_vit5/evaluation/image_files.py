"""Image files as sets: folders, and zip archives that are read without unpacking."""

from __future__ import annotations

import io
import zipfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeVar

import numpy as np

from sit_vit5.data.folder import scan
from sit_vit5.data.images import (
    EXTENSIONS,
    BadImage,
    describe_passed_over,
    is_image_name,
    kinds_passed_over,
    read_header,
    read_rgb,
)
from sit_vit5.errors import UserError, brief
from sit_vit5.metrics.image_sets import ImageSet, with_channels
from sit_vit5.progress import progress_bar

Value = TypeVar("Value")
OWN_FILES = ("metrics.json", "report.html")  # of an earlier evaluation of a folder
MOST_BYTES = 2**30  # of an image in an archive


class FileSet(ImageSet):
    """Images of one size, as stored, never resized, in the order of their names.

    Three channels, or one where all files are grey. The sizes of all files are compared before the
    first one is decoded (row E24).
    """

    def __init__(self, name: str, files: Sequence[Path | PurePosixPath], passed_over: Counter[str]):
        self.files = files
        sizes, formats, grey = [], Counter(), True
        with progress_bar(len(files), unit="file", title=f"sizes in {name}") as bar:
            for number in range(len(files)):
                header = self._call(read_header, number)
                sizes.append((header.width, header.height))
                formats[header.format] += 1
                grey = grey and header.grey
                bar.update()
        width, height = self._one_size(sizes)
        folders = len({file.parent for file in files})
        shape = (height, width, 1 if grey else 3)
        super().__init__(
            name, len(files), shape, formats=formats, passed_over=passed_over, folders=folders
        )

    @abstractmethod
    def _stream(self, number: int) -> Path | BinaryIO:
        """What Pillow opens."""

    @abstractmethod
    def _called(self, number: int) -> str:
        """What a person finds the image by."""

    def images(self, indices: Sequence[int]) -> np.ndarray:
        found = np.empty((len(indices), *self.shape), np.uint8)
        for place, number in enumerate(indices):
            pixels = np.asarray(self._call(read_rgb, number))
            found[place] = with_channels(pixels, self.shape[2], name=self._called(number))
        return found

    def _call(self, read: Callable[[Path | BinaryIO, str], Value], number: int) -> Value:
        """`read` of a file; a file that cannot be decoded becomes one line."""
        try:
            return read(self._stream(number), self._called(number))
        except BadImage as error:
            raise UserError(f"{error}; write the file again or remove it") from None

    def _one_size(self, sizes: list[tuple[int, int]]) -> tuple[int, int]:
        """The size of all; the first file that differs from most is named."""
        ((width, height), _), *others = Counter(sizes).most_common()
        if others:
            odd = next(n for n, size in enumerate(sizes) if size != (width, height))
            raise UserError(
                f"{self._called(odd)} is {sizes[odd][0]}x{sizes[odd][1]}, the others "
                f"{width}x{height}; all images must have one size, and real ones are "
                "cropped to one by evaluate/reference.py make"
            )
        return width, height


class FolderSet(FileSet):
    """All images below a folder."""

    def __init__(self, folder: Path):
        found = scan(folder)
        if not found.files:
            raise _no_image(folder, found.passed_over)
        own = Counter(Path(name).suffix for name in OWN_FILES if (folder / name).is_file())
        super().__init__(str(folder), found.files, found.passed_over - own)

    def _stream(self, number: int) -> Path:
        return self.files[number]

    def _called(self, number: int) -> str:
        return str(self.files[number])


class ZipSet(FileSet):
    """All images in a zip archive."""

    def __init__(self, path: Path):
        self.path = path
        entries = [entry for entry in self._archive.infolist() if _is_visible(entry.filename)]
        passed_over = kinds_passed_over(PurePosixPath(entry.filename).name for entry in entries)
        images = [entry for entry in entries if is_image_name(PurePosixPath(entry.filename).name)]
        if not images:
            raise _no_image(path, passed_over)
        self.entries = sorted(images, key=lambda entry: entry.filename)
        for entry, following in pairwise(self.entries):
            if entry.filename == following.filename:
                raise UserError(f"{path} holds {entry.filename} twice; write the archive again")
        names = [PurePosixPath(entry.filename) for entry in self.entries]
        super().__init__(str(path), names, passed_over)

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        """Kept open: of 50,000 files the directory alone takes a second to read."""
        try:
            return zipfile.ZipFile(self.path)
        except Exception as error:  # a damaged directory: a dozen types
            raise UserError(
                f"{self.path} is not a zip archive: {brief(error)}; write it again"
            ) from None

    def _stream(self, number: int) -> BinaryIO:
        entry = self.entries[number]
        if entry.file_size > MOST_BYTES:
            raise UserError(
                f"{self._called(number)} takes {entry.file_size / 1e9:.1f} GB, no image does; "
                "remove it"
            )
        try:
            return io.BytesIO(self._archive.read(entry))
        except Exception as error:  # zipfile, zlib, lzma; a password
            raise UserError(
                f"{self._called(number)} cannot be read: {brief(error)}; write the archive again"
            ) from None

    def _called(self, number: int) -> str:
        return f"{self.entries[number].filename} in {self.path}"


def _is_visible(name: str) -> bool:
    """Whether an entry is a file; not one in a hidden folder, nor what macOS adds."""
    path = PurePosixPath(name)
    hidden = any(part[0] == "." or part == "__MACOSX" for part in path.parts)
    return bool(path.name) and not name.endswith("/") and not hidden


def _no_image(place: Path, inside: Counter[str]) -> UserError:
    """What is there instead (row E25)."""
    found = f"; {describe_passed_over(inside)}" if inside else "; it is empty"
    return UserError(
        f"{place} holds no image (looked for {', '.join(EXTENSIONS)} at any depth){found}; give "
        "the place of the images"
    )
