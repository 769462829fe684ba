"""Arrays on disk, .npy files and members of .npz archives, found without being read.

Nothing here unpickles: an array of Python objects is described and never loaded.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib.format import open_memmap

from sit_vit5.utils.errors import UserError, brief
from sit_vit5.utils.files import check_plain, check_regular_file, replacing


@dataclass(frozen=True)
class StoredArray:
    """Where an array lies and what it is.

    member: its name in an archive, "" of an .npy file. start: where its numbers begin in the file;
    None: they are compressed.
    """

    path: Path
    member: str
    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    start: int | None

    @property
    def described(self) -> str:
        """For messages: `arr_0 of a.npz`, `a.npy`."""
        return f"{brief(_key(self.member), 80)} of {self.path}" if self.member else str(self.path)

    @property
    def nbytes(self) -> int:
        """Of all numbers, in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    @contextmanager
    def open(self, *, whole: bool) -> Iterator[BinaryIO]:
        """The file or the unpacked member, where the numbers begin.

        whole: it is read to its end, where the checksum of an archive is verified.
        """
        with _one_line(self.described):
            if self.start is not None and not (whole and self.member):
                with self.path.open("rb") as file:
                    file.seek(self.start)
                    yield file
            else:
                with zipfile.ZipFile(self.path) as archive:
                    with archive.open(self.member) as entry:
                        _read_header(entry)
                        yield entry

    def map(self) -> np.memmap:
        """The numbers in place; only of an array that is not compressed."""
        self._refuse_objects()
        order = "F" if self.fortran else "C"
        with _one_line(self.described):
            return np.memmap(self.path, self.dtype, "r", self.start, self.shape, order)

    def read(self) -> np.ndarray:
        """All numbers in memory; the checksum of an archive is verified."""
        self._refuse_objects()
        with _one_line(self.described):
            if not self.member:
                return np.load(self.path, allow_pickle=False)
            with zipfile.ZipFile(self.path) as archive:
                with archive.open(self.member) as entry:
                    return np.lib.format.read_array(entry, allow_pickle=False)

    def _refuse_objects(self) -> None:
        if self.dtype.hasobject:
            raise UserError(
                f"{self.described} cannot be read: it holds pickled Python objects, which may run "
                "foreign code; save it as plain numbers"
            )


def members(path: Path) -> dict[str, zipfile.ZipInfo]:
    """The arrays of an npz by name."""
    check_regular_file(path, remedy="write it again")
    try:
        with zipfile.ZipFile(path) as archive:
            return {_key(info.filename): info for info in archive.infolist()}
    except Exception as error:  # of a damaged directory: as in `_one_line`
        raise UserError(f"{path} is not an npz file: {brief(error)}; write it again") from None


def check_npz(path: Path, *, remedy: str) -> None:
    """Reads all of an npz: refuses one whose checksums do not hold."""
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.testzip()
            if member is not None:
                raise ValueError(f"the checksum of {_key(member)} does not hold")
    except Exception as error:  # of a damaged directory: as in `_one_line`
        raise UserError(f"{path} is damaged: {brief(error)}; {remedy}") from None


def find_member(path: Path, info: zipfile.ZipInfo) -> StoredArray:
    """An array of an npz; of `members`."""
    with _one_line(f"{brief(_key(info.filename), 80)} of {path}"):
        with zipfile.ZipFile(path) as archive, archive.open(info) as entry:
            shape, fortran, dtype = _read_header(entry)
            header = entry.tell()
        plain = info.compress_type == zipfile.ZIP_STORED
        start = _content_start(path, info) + header if plain else None
        found = StoredArray(path, info.filename, shape, dtype, fortran, start)
        _check_length(found, info.file_size - header)
    return found


def find_npy(path: Path) -> StoredArray:
    """The array of an .npy file."""
    check_regular_file(path, remedy="write it again")
    with _one_line(str(path)), path.open("rb") as file:
        shape, fortran, dtype = _read_header(file)
        found = StoredArray(path, "", shape, dtype, fortran, file.tell())
        _check_length(found, path.stat().st_size - file.tell())
    return found


def map_npy(
    path: Path, dtype: type, shape: tuple[int | None, ...], *, mode: str, remedy: str
) -> np.memmap:
    """The map of an .npy file of ours. Refuses another type, shape (None: any) or length.

    In mode r+ numpy would fill a file that is too short with zeros, and write through a link.
    """
    check_plain(path)
    try:
        with path.open("rb") as file:
            found, fortran, stored = _read_header(file)
            expected = file.tell() + math.prod(found) * stored.itemsize
        pairs = zip(found, shape, strict=True)
        fits = len(found) == len(shape) and all(wanted in (None, size) for size, wanted in pairs)
        if not fits or stored != dtype or fortran:
            raise ValueError(f"it holds {stored} {found}, expected {np.dtype(dtype)} {shape}")
        if (size := path.stat().st_size) != expected:
            raise ValueError(f"it has {size:,} bytes, expected {expected:,}")
        return open_memmap(path, mode=mode)
    except Exception as error:  # of a damaged header: many types
        raise UserError(f"{path} is damaged: {brief(error)}; {remedy}") from None


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Replaces `path` by an npz in one step. The same arrays give the same bytes.

    Maps are copied in pieces; nothing is compressed, so that a reader can seek.
    """
    try:
        with replacing(path) as partial, zipfile.ZipFile(partial, "w") as archive:
            for key, array in arrays.items():
                member = zipfile.ZipInfo(f"{key}.npy")  # dated 1980
                with archive.open(member, "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error}; free disk space or choose another"
        ) from None


def allocate_npy(path: Path, dtype: type, shape: tuple[int, ...]) -> None:
    """A zero-filled .npy whose blocks are on the disk: a map of a sparse file dies by SIGBUS."""
    try:
        with replacing(path) as partial:
            open_memmap(partial, mode="w+", dtype=dtype, shape=shape).flush()
            if hasattr(os, "posix_fallocate"):
                with partial.open("r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)
    except OSError as error:
        raise UserError(f"no room for {path}: {error}; choose another --out") from None


def _key(member: str) -> str:
    """The key of an npz by which numpy calls a member."""
    return member.removesuffix(".npy")


def _check_length(array: StoredArray, there: int) -> None:
    """Refuses what would be read beyond its end. there: bytes that follow the header."""
    if not array.dtype.hasobject and array.nbytes > there:
        raise ValueError(f"it holds {there} bytes, too few for {array.dtype} {array.shape}")


def _read_header(entry: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(entry)
    read = np.lib.format.read_array_header_2_0
    if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
    try:
        return read(entry)
    except ValueError as error:
        if "max_header_size" in str(error):  # NumPy's advice is to allow pickles
            raise ValueError("its header is too long") from None
        raise


def _content_start(path: Path, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a member begin: after its local header, name and extra field."""
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)
        name_length, extra_length = struct.unpack("<HH", file.read(4))
    return info.header_offset + 30 + name_length + extra_length


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Damage of any kind in one line: zipfile, zlib, lzma, numpy's parser, mmap raise a dozen
    types."""
    try:
        yield
    except (UserError, PermissionError):
        raise
    except Exception as error:
        raise UserError(
            f"{what} cannot be read: {brief(error)}; the file is damaged, write it again"
        ) from None
