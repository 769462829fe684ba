"""Fingerprints of the images that a latent cache was encoded from, to tell which changed since.

    FOLDER/shard_00000.sources      a record for each image of the shard

A record holds a hash of the image's bytes and a stamp: a hash of its file's size, times and number.
Where the stamp is still the same nothing is read; else the bytes decide, so that a copy of the data
is not taken for other data.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from sit_vit5.data.transforms import BadImage
from sit_vit5.utils.files import check_plain
from sit_vit5.utils.progress import progress_bar

RECORD = np.dtype([("stamp", "<u8"), ("content", "<u8")])


class Stored(Protocol):
    """What a source of images tells of an image as it is stored."""

    def __len__(self) -> int: ...

    def describe(self, index: int) -> str: ...

    def stamp(self, index: int) -> int: ...

    def coded(self, index: int) -> bytes: ...


def short_hash(*parts: object) -> int:
    """64 bits, never 0."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
    return int.from_bytes(digest.digest(), "little") or 1


def stamp_of(path: Path) -> int:
    """Changes whenever the file does; it may change for a copy too."""
    found = path.stat()
    return short_hash(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def fingerprint(source: Stored, index: int) -> np.ndarray:
    """The record of an image."""
    stamp = source.stamp(index)
    return np.array((stamp, short_hash(source.coded(index))), RECORD)


class Records:
    """The records of a shard, appended as its images are encoded."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, records: np.ndarray, *, done: int) -> None:
        """Adds records (n,) after the first `done`; those that are missing become unknown."""
        check_plain(self.path)
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.truncate(done * RECORD.itemsize)
            file.seek(0, os.SEEK_END)
            file.write(records.tobytes())

    def changed(self, source: Stored, indices: list[int]) -> Iterator[int]:
        """Those of the images, given by the indices of the records, whose content changed."""
        if not self.path.is_file():
            return  # of an older version
        content = self.path.read_bytes()
        records = np.frombuffer(
            content[: len(content) // RECORD.itemsize * RECORD.itemsize], RECORD
        )
        for index, record in zip(indices, records, strict=False):
            if record["content"] and _differs(source, index, record):
                yield index


def _differs(source: Stored, index: int, record: np.ndarray) -> bool:
    try:
        if source.stamp(index) == record["stamp"]:
            return False
        return short_hash(source.coded(index)) != record["content"]
    except (OSError, BadImage):  # it is gone, or cannot be read
        return True


def changed_images(
    source: Stored, shards: dict[Path, list[int]], *, shown: bool = True
) -> dict[Path, list[int]]:
    """The images that changed since they were encoded, by the file of their records.

    shards: the indices of the images that each file has records of.
    """
    found = {}
    total = sum(map(len, shards.values()))
    with progress_bar(total, unit="image", title="compare with the data", shown=shown) as bar:
        for path, indices in shards.items():
            changed = list(Records(path).changed(source, indices))
            if changed:
                found[path] = changed
            bar.update(len(indices))
    return found
