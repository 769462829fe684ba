"""A latent cache on disk: the moments of every image and of its mirror, by index.

FOLDER/encoding.json      what decides the moments; written first, another encoding is refused
FOLDER/shard_00000.bin    moments, plain numbers of one type: (images, mirrors, channels, h, w)
FOLDER/shard_00000.json   its count, SHA-256, sums, the images left out; written after it
FOLDER/labels.npy         int64, one per image
FOLDER/index.json         everything a reader needs; written last: without it there is no cache
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sit_vit5 import __version__
from sit_vit5.errors import UserError
from sit_vit5.files import file_hash

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
    missing = {"count", "shards", "codec", "image_size", "moments_shape"} - index.keys()
    if missing:
        raise UserError(f"{folder / INDEX_FILE} lacks {', '.join(sorted(missing))}; encode again")
    return index


def read_json(path: Path) -> dict:
    """A JSON object written by the encoding."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object")
    return value


def versions() -> dict:
    """For the record."""
    return {"sit_vit5": __version__, "numpy": np.__version__}
