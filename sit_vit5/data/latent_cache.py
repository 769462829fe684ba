"""A latent cache on disk: the moments of every image and of its mirror, by index.

FOLDER/encoding.json      what decides the moments; written first, another encoding is refused
FOLDER/shard_00000.bin    moments, plain numbers of one type: (images, mirrors, channels, h, w)
FOLDER/shard_00000.json   its count, SHA-256, sums, the images left out; written after it
FOLDER/labels.npy         int64, one per image
FOLDER/index.json         everything a reader needs; written last: without it there is no cache
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sit_vit5 import __version__
from sit_vit5.errors import UserError
from sit_vit5.files import file_hash, read_json

SCHEMA = 1
SETTINGS_FILE, INDEX_FILE, LABELS_FILE = "encoding.json", "index.json", "labels.npy"
DTYPES = ("float32", "float16")


def shard_name(number: int) -> str:
    """File name of a shard without its extension."""
    return f"shard_{number:05d}"


@dataclass(frozen=True)
class Shard:
    """One file of the cache. count: images in it; sha256: of its bytes."""

    file: str
    count: int
    sha256: str


class LatentCache:
    """Reads a cache as a source whose items are moments; `batch` copies them from memory maps.

    mirrored: whether mirrors will be asked for. Refuses an unfinished cache, one of another version
    or image size (None: any), and shards of another length; `sit_vit5.data.inspect --verify` checks
    hashes.
    """

    kind = "moments"

    def __init__(
        self,
        path: str | Path,
        *,
        image_size: int | None = None,
        mirrored: bool = False,
        unconditional: bool = False,
    ):
        self.root = Path(path)
        index = read_index(self.root)
        if image_size not in (None, index["image_size"]):
            raise UserError(
                f"latent cache {self.root} was encoded from images of {index['image_size']} "
                f"pixels, data.image_size is {image_size}; use {index['image_size']}, or encode "
                "again"
            )
        if mirrored and index["mirrors"] == 1:
            raise UserError(
                f"latent cache {self.root} holds no mirrored images; use --data.horizontal-flip "
                "False, or encode again without it"
            )
        self.item_shape = tuple(index["latent_shape"])
        self.moments_shape = tuple(index["moments_shape"])
        self.mirrors, self.dtype = index["mirrors"], np.dtype(index["dtype"])
        self.codec, self.raw_latents = index["codec"], index["raw_latents"]
        self.class_names = () if unconditional else tuple(index["class_names"])
        self.shards = [Shard(**shard) for shard in index["shards"]]
        labels = self._read_labels(index)
        self.labels = np.zeros_like(labels) if unconditional else labels
        # First image of every shard, and one past the last.
        self.starts = np.cumsum([0, *(shard.count for shard in self.shards)])
        self.identity = {
            "source": "latents",
            "count": len(self),
            "sha256": file_hash(self.root / INDEX_FILE),
        }
        for shard in self.shards:
            self._check_length(shard)
        self._maps: dict[int, np.memmap] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_maps": {}}  # a memory map would travel as its whole content

    def batch(self, indices: np.ndarray, mirrored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Moments (B, C, h, w), fp32, of images or of their mirrors, and labels (B,).

        indices: int (B,); mirrored: bool (B,).
        """
        moments = np.empty((len(indices), *self.moments_shape), np.float32)
        shards = np.searchsorted(self.starts, indices, side="right") - 1
        rows, mirrors = indices - self.starts[shards], mirrored.astype(np.intp)
        for shard in np.unique(shards):
            here = shards == shard
            moments[here] = self.shard(int(shard))[rows[here], mirrors[here]]
        return moments, self.labels[indices]

    def shard(self, number: int) -> np.memmap:
        """The moments of one shard, (images, mirrors, C, h, w)."""
        if number not in self._maps:
            shard = self.shards[number]
            shape = (shard.count, self.mirrors, *self.moments_shape)
            self._check_length(shard)  # it may have gone since the start
            self._maps[number] = np.memmap(self.root / shard.file, self.dtype, "r", shape=shape)
        return self._maps[number]

    def describe(self, index: int) -> str:
        """Where an image's moments lie, for messages."""
        shard = int(np.searchsorted(self.starts, index, side="right")) - 1
        return f"{self.root / self.shards[shard].file}, image {index - self.starts[shard]}"

    def _read_labels(self, index: dict) -> np.ndarray:
        path = self.root / LABELS_FILE
        if not path.is_file() or file_hash(path) != index["labels_sha256"]:
            raise UserError(f"{path} is missing or was changed; encode again")
        labels = np.load(path, allow_pickle=False)
        if len(labels) != index["count"]:
            raise UserError(f"{path} holds {len(labels)} labels for {index['count']} images")
        classes = max(len(index["class_names"]), 1)
        if labels.min() < 0 or labels.max() >= classes:
            raise UserError(
                f"{path} holds labels from {labels.min()} to {labels.max()} for {classes} classes; "
                "encode again"
            )
        return labels

    def _check_length(self, shard: Shard) -> None:
        path = self.root / shard.file
        expected = shard.count * self.mirrors * int(np.prod(self.moments_shape))
        expected *= self.dtype.itemsize
        found = path.stat().st_size if path.is_file() else None
        if found != expected:
            state = "is missing" if found is None else f"holds {found} bytes, not {expected}"
            raise UserError(
                f"shard {path} {state}; remove it and {INDEX_FILE}, then run the encoding again: "
                "only what is missing is made"
            )


def is_cache(path: Path) -> bool:
    """Whether a folder is a latent cache, finished or not."""
    return any((path / name).is_file() for name in (INDEX_FILE, SETTINGS_FILE))


def read_index(folder: Path) -> dict:
    """The index of a finished cache of this version."""
    if not (folder / INDEX_FILE).is_file():
        if (folder / SETTINGS_FILE).is_file():
            raise UserError(
                f"latent cache {folder} is not complete; run its encoding again: only what is "
                "missing is made"
            )
        raise UserError(f"{folder} is no latent cache: it has no {INDEX_FILE}")
    index = read_json(folder / INDEX_FILE)
    if index.get("schema") != SCHEMA:
        raise UserError(
            f"latent cache {folder} has schema {index.get('schema')}, this version reads {SCHEMA}; "
            "encode again, or use the version that wrote it"
        )
    wrong = _first_wrong(index)
    if wrong is not None:
        raise UserError(
            f"{folder / INDEX_FILE} was changed: {wrong} is not what the encoding writes; remove "
            "the file and encode again: only what is missing is made"
        )
    return index


def _first_wrong(index: dict) -> str | None:
    """The first entry of an index that is missing, or that no encoding writes."""
    for key, is_right in _ENTRIES.items():
        if key not in index or not is_right(index[key]):
            return f"{key} {index.get(key)!r:.80}"
    if sum(shard["count"] for shard in index["shards"]) != index["count"]:
        return f"count {index['count']}, unlike the sum of the shards,"
    return None


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0  # True is an int too


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_count, value))


def _is_shard(value: object) -> bool:
    """A shard whose file lies in the cache."""
    return (
        isinstance(value, dict)
        and value.keys() == {"file", "count", "sha256"}
        and re.fullmatch(r"shard_\d{5,}\.bin", str(value["file"])) is not None
        and _is_count(value["count"])
        and isinstance(value["sha256"], str)
    )


def _is_list_of(is_right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


# What a reader needs of an index, and whether a value can be that.
_ENTRIES: dict[str, Callable[[object], bool]] = {
    "count": _is_count,
    "image_size": _is_count,
    "mirrors": lambda value: _is_count(value) and value <= 2,
    "dtype": lambda value: value in DTYPES,
    "latent_shape": _is_shape,
    "moments_shape": _is_shape,
    "class_names": _is_list_of(lambda name: isinstance(name, str)),
    "codec": lambda value: isinstance(value, dict),
    "raw_latents": lambda value: isinstance(value, dict) and value.keys() == {"mean", "std"},
    "labels_sha256": lambda value: isinstance(value, str),
    "shards": _is_list_of(_is_shard),
}


def versions() -> dict:
    """For the record."""
    return {"sit_vit5": __version__, "numpy": np.__version__}
