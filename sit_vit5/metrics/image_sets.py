"""Sets of uint8 images as streams of batches: npz archives of any size, and arrays."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sit_vit5.errors import UserError

IMAGES_KEY = "arr_0"


@dataclass(frozen=True)
class ImageSet:
    """count images of one shape (H, W, C); `batches(size)` streams uint8 (B, H, W, C)."""

    name: str
    count: int
    shape: tuple[int, int, int]
    batches: Callable[[int], Iterator[np.ndarray]]


def array_set(name: str, images: np.ndarray) -> ImageSet:
    """A set in memory. images: uint8 (N, H, W, C)."""
    check_images(name, images.shape, images.dtype)

    def batches(size: int) -> Iterator[np.ndarray]:
        for start in range(0, len(images), size):
            yield images[start : start + size]

    return ImageSet(name, len(images), images.shape[1:], batches)


def npz_set(path: Path) -> ImageSet:
    """`arr_0` of an npz, read in pieces: 50,000 images need not fit into memory."""
    keys = npz_keys(path)
    if IMAGES_KEY not in keys:
        raise UserError(f"{path} holds {', '.join(keys) or 'nothing'}; expected {IMAGES_KEY}")
    with _open(path, IMAGES_KEY) as entry:
        shape, fortran, dtype = _read_header(entry)
    if fortran:
        raise UserError(f"{path}: {IMAGES_KEY} is in Fortran order; save it in C order")
    check_images(str(path), shape, dtype)

    def batches(size: int) -> Iterator[np.ndarray]:
        row = int(np.prod(shape[1:]))
        with _open(path, IMAGES_KEY) as entry:
            _read_header(entry)
            for start in range(0, shape[0], size):
                rows = min(size, shape[0] - start)
                piece = np.frombuffer(entry.read(rows * row), np.uint8)
                yield piece.reshape(rows, *shape[1:])

    return ImageSet(str(path), shape[0], shape[1:], batches)


def npz_keys(path: Path) -> list[str]:
    """Names of the arrays in an npz."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not an npz file: {error}") from None


def npz_array(path: Path, key: str) -> np.ndarray:
    """One array of an npz; pickled objects are refused."""
    with _open(path, key) as entry:
        return np.lib.format.read_array(entry, allow_pickle=False)


@contextmanager
def _open(path: Path, key: str) -> Iterator[zipfile.ZipExtFile]:
    """The member of an npz as a stream; damage of any kind becomes one line."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as entry:
            yield entry
    except UserError:
        raise
    except Exception as error:  # zipfile, zlib, lzma, numpy's header parser: a dozen types
        raise UserError(f"{path}: {key} cannot be read, the file is damaged: {error}") from None


def check_images(name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Refuses what is not a non-empty uint8 array (N, H, W, 1 or 3)."""
    if len(shape) != 4 or shape[-1] not in (1, 3) or dtype != np.uint8:
        raise UserError(
            f"{name}: expected uint8 images (N, H, W, 1 or 3), found {dtype} {tuple(shape)}"
        )
    if min(shape) < 1:
        raise UserError(f"{name} holds no image")


def _read_header(entry: zipfile.ZipExtFile) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(entry)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(entry)
    return np.lib.format.read_array_header_2_0(entry)
