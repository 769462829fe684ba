"""Sets of uint8 images: a stream of batches, or single images by number; of any size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sit_vit5.utils.arrays import StoredArray, find_member, find_npy, members
from sit_vit5.utils.errors import UserError

IMAGES_KEY = "arr_0"
GREY_BATCH = 256  # images whose channels are compared together
LOOKED_AT = 256  # images of a wrong type that are read to say more of them
TO_UINT8 = "floor(clamp(127.5 x + 128, 0, 255))"


class ImageSet(ABC):
    """`count` images of one shape (H, W, C), uint8. Reads what is asked for and keeps nothing.

    formats: how many files there are of each format, such as PNG; passed_over: of each kind that is
    no image; folders: in how many folders they lie; empty and 0 for arrays.
    """

    def __init__(
        self,
        name: str,
        count: int,
        shape: tuple[int, ...],
        *,
        formats: Mapping[str, int] | None = None,
        passed_over: Mapping[str, int] | None = None,
        folders: int = 0,
    ):
        self.name, self.count, self.shape = name, count, shape
        self.formats, self.folders = dict(formats or {}), folders
        self.passed_over = dict(passed_over or {})

    @abstractmethod
    def images(self, indices: Sequence[int]) -> np.ndarray:
        """The images of these numbers in this order, (n, H, W, C)."""

    def batches(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """Images start, start + 1, ... below stop (None: to the end) in batches of `size`."""
        for numbers in runs(size, start, self._end(stop)):
            yield self.images(numbers)

    def is_grey(self) -> bool:
        """Whether all images are grey: one channel, or three equal ones in every image."""
        return self.shape[2] == 1 or all(map(equal_channels, self.batches(GREY_BATCH)))

    def _end(self, stop: int | None) -> int:
        return self.count if stop is None else min(stop, self.count)


def equal_channels(images: np.ndarray) -> bool:
    """Whether images (..., C) have one channel, or channels that are all equal."""
    return bool((images[..., 1:] == images[..., :1]).all())


def with_channels(images: np.ndarray, channels: int, *, name: str) -> np.ndarray:
    """Images (..., 1 or 3) with one channel or three: one equals three equal ones.

    name: of the images, for the error if one of them is in colour.
    """
    if images.shape[-1] == channels:
        return images
    if channels == 3:
        return np.repeat(images, 3, axis=-1)
    if not equal_channels(images):
        raise UserError(
            f"{name}: an image is in colour; the images that it is compared with are grey"
        )
    return images[..., :1]


def runs(size: int, start: int, stop: int) -> Iterator[range]:
    """start .. stop - 1 in runs of `size`; the last may be shorter."""
    for first in range(start, stop, size):
        yield range(first, min(first + size, stop))


class ArraySet(ImageSet):
    """Images in memory, or an array that is mapped."""

    def __init__(self, name: str, images: np.ndarray):
        check_images(name, images.shape, images.dtype)
        super().__init__(name, len(images), images.shape[1:])
        self._images = images

    def images(self, indices: Sequence[int]) -> np.ndarray:
        if isinstance(indices, range) and indices.step == 1:
            return self._images[indices.start : indices.stop]  # no copy
        return self._images[np.asarray(indices, np.intp)]


class StoredSet(ImageSet):
    """Images of an array on disk.

    Read by seeking, not mapped: the pages of a map count as memory of the process. Those of a
    compressed archive come one after the other, so single ones cost a pass over the file.
    """

    def __init__(self, array: StoredArray):
        check_array(array)
        super().__init__(str(array.path), array.shape[0], array.shape[1:])
        self.array = array
        self.row = int(np.prod(self.shape))  # bytes of an image

    def images(self, indices: Sequence[int]) -> np.ndarray:
        numbers, places = np.unique(np.asarray(indices, np.int64), return_inverse=True)
        found = np.empty((len(numbers), *self.shape), np.uint8)
        with self.array.open(whole=False) as file:
            at = 0  # number of the image that comes next in the file
            for row, number in enumerate(numbers.tolist()):
                file.seek((number - at) * self.row, 1)
                found[row], at = self._read(file, 1)[0], number + 1
        return found[places]

    def batches(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        with self.array.open(whole=start == 0) as file:
            file.seek(start * self.row, 1)
            for numbers in runs(size, start, self._end(stop)):
                yield self._read(file, len(numbers))

    def _read(self, file: BinaryIO, rows: int) -> np.ndarray:
        content = file.read(rows * self.row)
        if len(content) < rows * self.row:
            raise ValueError("the file ends before its images do")
        return np.frombuffer(content, np.uint8).reshape(rows, *self.shape)


class UnmadeSet(ImageSet):
    """Images that a model is yet to make: only their size is known."""

    def __init__(self, name: str, shape: tuple[int, int, int]):
        super().__init__(name, 1, shape)

    def images(self, indices: Sequence[int]) -> np.ndarray:
        raise AssertionError("these images are not made yet")

    def is_grey(self) -> bool:
        return self.shape[2] == 1


def array_set(name: str, images: np.ndarray) -> ImageSet:
    """A set in memory. images: uint8 (N, H, W, C)."""
    return ArraySet(name, images)


def npz_set(path: Path) -> ImageSet:
    """`arr_0` of an npz, read in pieces: 50,000 images need not fit into memory."""
    there = members(path)
    if IMAGES_KEY not in there:
        raise UserError(
            f"{path} holds {', '.join(there) or 'nothing'}; expected {IMAGES_KEY}, uint8 images "
            "(N, H, W, 1 or 3)"
        )
    return StoredSet(find_member(path, there[IMAGES_KEY]))


def npy_set(path: Path) -> ImageSet:
    """The images of an .npy file, read in pieces."""
    return StoredSet(find_npy(path))


def check_images(name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Refuses what is not a non-empty uint8 array (N, H, W, 1 or 3)."""
    if len(shape) != 4 or shape[-1] not in (1, 3) or dtype != np.uint8:
        advice = _advice(shape, dtype)
        raise UserError(
            f"{name}: expected uint8 images (N, H, W, 1 or 3), found {dtype} {tuple(shape)}"
            + (f"; {advice}" if advice else "")
        )
    if min(shape) < 1:
        raise UserError(f"{name} holds no image")


def check_array(array: StoredArray) -> None:
    """`check_images` of an array on disk; of floats it says in which range they lie."""
    if array.fortran and array.dtype == np.uint8:
        raise UserError(f"{array.described} is in Fortran order; save it in C order")
    try:
        check_images(array.described, array.shape, array.dtype)
    except UserError as error:
        found = _range(array) if array.dtype.kind == "f" and array.shape and array.nbytes else ""
        raise UserError(f"{error}{found}") from None


def _advice(shape: tuple[int, ...], dtype: np.dtype) -> str:
    """What to do about images of another type or order of axes."""
    if dtype.hasobject:
        return "these are pickled Python objects, which may run foreign code: save plain numbers"
    if dtype.kind in "iu" and dtype != np.uint8:
        return "save grey levels 0 to 255 as uint8"
    if dtype != np.uint8:
        return f"of x in [-1, 1] save {TO_UINT8}, of x in [0, 1] round(255 x), as uint8"
    if len(shape) == 4 and shape[1] in (1, 3):
        return "channels come last: save images.transpose(0, 2, 3, 1)"
    if len(shape) == 3:
        return "save grey images with a last axis, images[..., None]"
    if len(shape) == 4 and shape[-1] == 4:
        return "drop alpha: save images[..., :3]"
    return ""


def _range(array: StoredArray) -> str:
    """Of the first images of floats: their range, or which are not finite."""
    rows = min(LOOKED_AT, array.shape[0])
    each = array.nbytes // array.shape[0]
    with array.open(whole=False) as file:
        values = np.frombuffer(file.read(rows * each), array.dtype).reshape(rows, -1)
    broken = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(broken):
        return f"; of the first {rows} images {len(broken)} are not finite, such as {broken[0]}"
    return f"; the first {rows} images lie in [{values.min():g}, {values.max():g}]"
