"""Image files as sets: folders, and zip archives that are read without unpacking."""

from __future__ import annotations

import io
import zipfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeVar

import numpy as np

from sit_vit5.data.folder import list_images
from sit_vit5.data.images import EXTENSIONS, BadImage, is_image_name, read_header, read_rgb
from sit_vit5.errors import UserError
from sit_vit5.metrics.image_sets import ImageSet
from sit_vit5.progress import progress_bar

Value = TypeVar("Value")
NAMED = 4  # kinds of other files in a message


class FileSet(ImageSet):
    """Images of one size, as stored, never resized, in the order of their names; RGB.

    The sizes of all files are compared before the first one is decoded (row E24).
    """

    def __init__(self, name: str, files: Sequence[Path | PurePosixPath]):
        self.files = files
        sizes, formats = [], Counter()
        with progress_bar(len(files), unit="file", title=f"sizes in {name}") as bar:
            for number in range(len(files)):
                header = self._call(read_header, number)
                sizes.append((header.width, header.height))
                formats[header.format] += 1
                bar.update()
        width, height = self._one_size(sizes)
        folders = len({file.parent for file in files})
        super().__init__(
            name, len(files), (height, width, 3), formats=dict(formats), folders=folders
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
            found[place] = self._call(read_rgb, number)
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
        files = list_images(folder)
        if not files:
            inside = Counter(path.suffix.lower() for path in folder.rglob("*") if path.is_file())
            raise _no_image(folder, inside)
        super().__init__(str(folder), files)

    def _stream(self, number: int) -> Path:
        return self.files[number]

    def _called(self, number: int) -> str:
        return str(self.files[number])


class ZipSet(FileSet):
    """All images in a zip archive."""

    def __init__(self, path: Path):
        self.path = path
        names = [name for name in self._archive.namelist() if name[-1] != "/"]
        self.names = sorted(name for name in names if _counts(PurePosixPath(name)))
        if not self.names:
            raise _no_image(path, Counter(PurePosixPath(name).suffix.lower() for name in names))
        super().__init__(str(path), [PurePosixPath(name) for name in self.names])

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        """Kept open: of 50,000 files the directory alone takes a second to read."""
        try:
            return zipfile.ZipFile(self.path)
        except Exception as error:  # a damaged directory: a dozen types
            raise UserError(f"{self.path} is not a zip archive: {error}; write it again") from None

    def _stream(self, number: int) -> BinaryIO:
        try:
            return io.BytesIO(self._archive.read(self.names[number]))
        except Exception as error:  # zipfile, zlib, lzma; a password
            raise UserError(
                f"{self._called(number)} cannot be read: {error}; write the archive again"
            ) from None

    def _called(self, number: int) -> str:
        return f"{self.names[number]} in {self.path}"


def _counts(name: PurePosixPath) -> bool:
    """Whether an entry is an image; not of hidden folders, nor of what macOS adds."""
    hidden = any(part[0] == "." or part == "__MACOSX" for part in name.parts)
    return not hidden and is_image_name(name.name)


def _no_image(place: Path, inside: Counter) -> UserError:
    """What is there instead (row E25)."""
    kinds = [f"{count} {suffix or 'without extension'}" for suffix, count in inside.most_common()]
    more = ", ..." if len(kinds) > NAMED else ""
    found = f"; found {', '.join(kinds[:NAMED])}{more}" if kinds else "; it is empty"
    return UserError(
        f"{place} holds no image (looked for {', '.join(EXTENSIONS)} at any depth){found}; give "
        "the place of the images"
    )
