"""A latent cache on disk: the moments of every image and of its mirror, by index.

FOLDER/encoding.json      what decides the moments; written first, another encoding is refused
FOLDER/shard_00000.bin    moments, plain numbers of one type: (images, mirrors, channels, h, w)
FOLDER/shard_00000.json   its count, SHA-256, sums, the images left out; written after it
FOLDER/shard_00000.sources  fingerprints of the images that it was encoded from
FOLDER/labels.npy         int64, one per image
FOLDER/index.json         everything a reader needs; written last: without it there is no cache
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, MinLen, Predicate
from tqdm import tqdm

from sit_vit5 import __version__
from sit_vit5.data.sources import checked_names
from sit_vit5.utils.arrays import find_npy
from sit_vit5.utils.errors import UserError, brief
from sit_vit5.utils.files import file_hash, read_json
from sit_vit5.utils.progress import progress_bar

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None

SCHEMA = 1
MOST_MAPS = 4096  # memory maps of shards that are kept open
SETTINGS_FILE, INDEX_FILE, LABELS_FILE = "encoding.json", "index.json", "labels.npy"
CHANGED = "it was changed; remove it and encode again: only what is missing is made"

Count = Annotated[int, Ge(1)]
Shape = tuple[Count, Count, Count]
PerChannel = Annotated[tuple[float, ...], MinLen(1)]


def shard_name(number: int) -> str:
    """File name of a shard without its extension."""
    return f"shard_{number:05d}"


def _is_shard_file(name: str) -> bool:
    return re.fullmatch(r"shard_\d{5,}\.bin", name) is not None


@dataclass(frozen=True)
class Shard:
    """One file of the cache. count: images in it; sha256: of its bytes."""

    file: Annotated[str, Predicate(_is_shard_file)]
    count: Count
    sha256: str


@dataclass(frozen=True)
class CodecRecord:
    """As `codecs.recorded.RecordedCodec` writes and reads it."""

    name: str
    identity: dict
    draws_noise: bool
    origin: dict


@dataclass(frozen=True)
class ImageOptions:
    """Options that open the encoded images again; path: from the root."""

    source: str | None
    path: str | None
    split: str
    image_column: str | None
    label_column: str | None
    unconditional: bool


@dataclass(frozen=True)
class Encoding:
    """encoding.json: what decides the moments.

    data: identity of the source. latent_shape: (c, h, w). moments_shape: (C, h, w).
    """

    data: dict
    class_names: tuple[str, ...]
    image_size: Count
    latent_shape: Shape
    moments_shape: Shape
    mirrors: Literal[1, 2]
    dtype: Literal["float32", "float16"]
    shard_size: Count
    codec: CodecRecord
    images: ImageOptions | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Statistics:
    """Of every channel of the latents before the normalisation."""

    mean: PerChannel
    std: PerChannel


@dataclass(frozen=True)
class Index(Encoding):
    """index.json: everything a reader needs."""

    schema: int
    count: Count
    bad_images: Annotated[int, Ge(0)]
    labels_sha256: str
    raw_latents: Statistics
    shards: tuple[Shard, ...]


class LatentCache:
    """Reads a cache as a source whose items are moments; `batch` copies them from memory maps.

    mirrored: whether mirrors will be asked for. Refuses an unfinished cache, one of another version
    or image size (None: any), and shards of another length; `inspect --verify` checks hashes.
    """

    kind = "moments"
    notes = ()

    def __init__(
        self,
        path: str | Path,
        *,
        image_size: int | None = None,
        mirrored: bool = False,
        unconditional: bool = False,
    ):
        self.root = Path(path)
        self.index = index = read_index(self.root)
        if image_size not in (None, index.image_size):
            raise UserError(
                f"latent cache {self.root} was encoded from images of {index.image_size} pixels, "
                f"data.image_size is {image_size}; use {index.image_size}, or encode again"
            )
        if mirrored and index.mirrors == 1:
            raise UserError(
                f"latent cache {self.root} holds no mirrored images; use --data.horizontal-flip "
                "False, or encode again without it"
            )
        self.item_shape, self.moments_shape = index.latent_shape, index.moments_shape
        self.mirrors, self.dtype = index.mirrors, np.dtype(index.dtype)
        self.codec, self.raw_latents = asdict(index.codec), index.raw_latents
        self.class_names = () if unconditional else checked_names(index.class_names)
        self.shards = index.shards
        labels = self._read_labels(index)
        self.labels = np.zeros_like(labels) if unconditional else labels
        for shard in self.shards:
            self._check_length(shard)
        # First image of every shard, and one past the last.
        self.starts = np.cumsum([0, *(shard.count for shard in self.shards)])
        self.identity = {
            "source": "latents",
            "count": len(self),
            "sha256": file_hash(self.root / INDEX_FILE),
        }
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
        found = self._maps.pop(number, None)
        if found is None:
            shard = self.shards[number]
            shape = (shard.count, self.mirrors, *self.moments_shape)
            self._check_length(shard)  # it may have gone since the start
            # Every map keeps a file open: those unused for longest are closed.
            while len(self._maps) >= _most_maps():
                del self._maps[next(iter(self._maps))]
            found = np.memmap(self.root / shard.file, self.dtype, "r", shape=shape)
        self._maps[number] = found
        return found

    def describe(self, index: int) -> str:
        """Where an image's moments lie, for messages."""
        shard = int(np.searchsorted(self.starts, index, side="right")) - 1
        return f"{self.root / self.shards[shard].file}, image {index - self.starts[shard]}"

    def _read_labels(self, index: Index) -> np.ndarray:
        path = self.root / LABELS_FILE
        if not path.is_file() or file_hash(path) != index.labels_sha256:
            raise UserError(f"{path} is missing or was changed; encode again")
        stored = find_npy(path)
        if stored.dtype != np.int64 or stored.shape != (index.count,):
            raise UserError(
                f"{path} was changed: it holds {stored.dtype} {stored.shape}, not a label for each "
                f"of {index.count} images; remove it and {INDEX_FILE}, and encode again"
            )
        labels = stored.read()
        classes = max(len(index.class_names), 1)
        if labels.min() < 0 or labels.max() >= classes:
            raise UserError(
                f"{path} holds labels from {labels.min()} to {labels.max()} for {classes} classes; "
                "encode again"
            )
        return labels

    def _check_length(self, shard: Shard) -> None:
        path = self.root / shard.file
        image = self.mirrors * math.prod(self.moments_shape) * self.dtype.itemsize
        check_shard(path, shard.count * image)


def check_shard(path: Path, expected: int) -> None:
    """Refuses a shard that is missing or of another length. expected: its bytes."""
    found = path.stat().st_size if path.is_file() else None
    if found != expected:
        state = "is missing" if found is None else f"holds {found} bytes, not {expected}"
        raise UserError(
            f"shard {path} {state}; remove it and {INDEX_FILE}, then run the encoding again: only "
            "what is missing is made"
        )


def is_cache(path: Path) -> bool:
    """Whether a folder is a latent cache, finished or not."""
    return any((path / name).is_file() for name in (INDEX_FILE, SETTINGS_FILE))


def read_index(folder: Path) -> Index:
    """The index of a finished cache of this version."""
    path = folder / INDEX_FILE
    if not path.is_file():
        if (folder / SETTINGS_FILE).is_file():
            raise UserError(
                f"latent cache {folder} is not complete; run its encoding again: only what is "
                "missing is made"
            )
        raise UserError(f"{folder} is no latent cache: it has no {INDEX_FILE}")
    schema = read_json(path, remedy=CHANGED).get("schema")
    if schema != SCHEMA:
        raise UserError(
            f"latent cache {folder} has schema {brief(schema)}, this version reads {SCHEMA}; "
            "encode again, or use the version that wrote it"
        )
    index = read_json(path, Index, remedy=CHANGED)
    wrong = _contradiction(index)
    if wrong:
        raise UserError(f"{path} cannot be read: {wrong}; {CHANGED}")
    return index


def _contradiction(index: Index) -> str:
    """The first entries of an index that do not fit one another, in words; empty without."""
    if sum(shard.count for shard in index.shards) != index.count:
        return f"count {index.count}, unlike the sum of the shards"
    if len({shard.file for shard in index.shards}) < len(index.shards):
        return "shards holds a file twice"
    channels, *size = index.latent_shape
    draws = 2 if index.codec.draws_noise else 1
    if index.moments_shape != (channels * draws, *size):
        return f"moments_shape {index.moments_shape} does not fit latent_shape"
    statistics = index.raw_latents
    if {len(statistics.mean), len(statistics.std)} != {channels}:
        return f"raw_latents of other than {channels} channels"
    return ""


def _most_maps() -> int:
    """How many maps are kept: half of the files that a process may open."""
    if resource is None:
        return MOST_MAPS
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_MAPS if limit < 0 else min(max(limit // 2, 1), MOST_MAPS)


def versions() -> dict:
    """For the record."""
    return {"sit_vit5": __version__, "numpy": np.__version__}


_AT_ONCE = 1 << 24  # bytes


def verify(cache: LatentCache, *, shown: bool = True) -> list[str]:
    """What is wrong, one line each with the file's name; empty if nothing is."""
    problems = []
    size = sum((cache.root / shard.file).stat().st_size for shard in cache.shards)
    with progress_bar(size, unit="B", title="verify", shown=shown) as bar:
        bar.unit_scale = True
        for shard in cache.shards:
            digest, bad = _read(cache, shard, bar)
            path = cache.root / shard.file
            if digest != shard.sha256:
                problems.append(
                    f"{path} was changed: its SHA-256 is {digest[:12]}..., the index says "
                    f"{shard.sha256[:12]}...; remove it and index.json, and encode again"
                )
            if bad:
                problems.append(f"{path} holds {bad} values that are not finite; encode again")
    return problems


def _read(cache: LatentCache, shard: Shard, bar: tqdm) -> tuple[str, int]:
    """SHA-256 of a shard and how many of its values are not finite."""
    digest, bad = hashlib.sha256(), 0
    with (cache.root / shard.file).open("rb") as file:
        while piece := file.read(_AT_ONCE):
            digest.update(piece)
            bad += int(np.count_nonzero(~np.isfinite(np.frombuffer(piece, cache.dtype))))
            bar.update(len(piece))
    return digest.hexdigest(), bad
