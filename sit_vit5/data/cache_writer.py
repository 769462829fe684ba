"""Writing a latent cache that can be killed at any moment and gone on with.

A shard grows by whole images in `shard_N.bin.partial`, so its length says how many are done.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge

from sit_vit5.data.fingerprints import Records, Stored
from sit_vit5.data.latent_cache import (
    CHANGED,
    INDEX_FILE,
    LABELS_FILE,
    SCHEMA,
    SETTINGS_FILE,
    Index,
    PerChannel,
    Shard,
    check_shard,
    shard_name,
    versions,
)
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import check_plain, file_hash, read_json, replacing, sync, write_json

# What encoding writes beside encoding.json, as patterns.
BAD_IMAGES = "bad_images.txt"
SOURCES = ".sources"  # extension of a shard's fingerprints
OWN_FILES = (
    "shard_*.bin",
    "shard_*.bin.partial",
    "shard_*.json",
    "shard_*.bad",
    f"shard_*{SOURCES}",
    LABELS_FILE,
    INDEX_FILE,
    BAD_IMAGES,
)
# Above this share of bad images the data set is broken, not flawed.
MAX_BAD = 0.01
_IMAGES_AT_ONCE = 256  # when sums are taken


@dataclass(frozen=True)
class Layout:
    """How a data set is cut into shards.

    moments_shape: (C, h, w) of one mirror of one image; draws_noise: C is means and log-variances.
    """

    count: int
    shard_size: int
    mirrors: int
    moments_shape: tuple[int, int, int]
    draws_noise: bool
    dtype: str

    @classmethod
    def of(cls, index: Index) -> Layout:
        """That of a finished cache."""
        return cls(
            count=index.count + index.bad_images,
            shard_size=index.shard_size,
            mirrors=index.mirrors,
            moments_shape=index.moments_shape,
            draws_noise=index.codec.draws_noise,
            dtype=index.dtype,
        )

    @property
    def shards(self) -> range:
        """Numbers of the shards."""
        return range(-(-self.count // self.shard_size))

    @property
    def latent_channels(self) -> int:
        """Channels of the latents that a model sees."""
        return self.moments_shape[0] // (2 if self.draws_noise else 1)

    @property
    def image_bytes(self) -> int:
        """Bytes of one image with its mirror."""
        return self.mirrors * int(np.prod(self.moments_shape)) * np.dtype(self.dtype).itemsize

    def indices(self, shard: int) -> range:
        """Images of the source that belong to a shard."""
        return range(shard * self.shard_size, min((shard + 1) * self.shard_size, self.count))


@dataclass(frozen=True)
class Facts:
    """A shard's JSON file. bad: why images are left out, by index; sums: per channel."""

    count: Annotated[int, Ge(0)]
    sha256: str
    bad: dict[int, str]
    sum: PerChannel
    sum_of_squares: PerChannel


class ShardWriter:
    """Takes the images of one shard in order; a killed one goes on where it was.

    missing: indices of the images to give to `append`, in this order.
    """

    def __init__(self, folder: Path, number: int, layout: Layout):
        self.layout, name = layout, shard_name(number)
        self.final, self.facts = folder / f"{name}.bin", folder / f"{name}.json"
        self.partial, self.bad_file = folder / f"{name}.bin.partial", folder / f"{name}.bad"
        if not self.final.exists():
            self.facts.unlink(missing_ok=True)  # of a shard that was taken away
        elif not self.facts.exists():  # killed between the two
            os.replace(self.final, self.partial)
        self.records = Records(folder / f"{name}{SOURCES}")
        self.bad = _read_bad(self.bad_file, layout.indices(number))
        good = [index for index in layout.indices(number) if index not in self.bad]
        self.done = 0
        check_plain(self.partial)
        if self.partial.exists():
            self.done = self.partial.stat().st_size // layout.image_bytes
        if self.done > len(good):  # it is of another shard
            self.partial.unlink()
            self.done = 0
        self.missing = good[self.done :]

    def append(
        self, moments: np.ndarray, bad: dict[int, str], records: np.ndarray | None = None
    ) -> None:
        """Adds images (n, mirrors, C, h, w), and the reasons of bad ones among them by index.

        records: the images' fingerprints (n,). On the disk when it returns. Bad ones and
        fingerprints first: a kill in between only repeats the good.
        """
        if records is not None:
            self.records.append(records, done=self.done)
        if bad:
            self.bad |= bad
            write_json(self.bad_file, self.bad)
        with self.partial.open("r+b" if self.partial.exists() else "wb") as file:
            file.truncate(self.done * self.layout.image_bytes)  # an image cut by a kill
            file.seek(0, os.SEEK_END)
            file.write(moments.astype(self.layout.dtype, copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())
        self.done += len(moments)

    def finish(self) -> None:
        """Gives the shard its name and writes what is to be known of it."""
        with self.partial.open("ab") as file:  # there is none yet if all images are bad
            file.truncate(self.done * self.layout.image_bytes)
        os.replace(self.partial, self.final)
        sync(self.final.parent)
        facts = {
            "count": self.done,
            "sha256": file_hash(self.final),
            "bad": self.bad,
        }
        write_json(self.facts, facts | self._sums())
        self.bad_file.unlink(missing_ok=True)

    def _sums(self) -> dict:
        """Sums over images and pixels, per channel, of the latents and of their squares."""
        if self.done == 0:
            return {"sum": [0.0], "sum_of_squares": [0.0]}
        shape = (self.done, self.layout.mirrors, *self.layout.moments_shape)
        stored = np.memmap(self.final, self.layout.dtype, "r", shape=shape)
        sums = []
        for start in range(0, self.done, _IMAGES_AT_ONCE):
            mean = stored[start : start + _IMAGES_AT_ONCE].astype(np.float64)
            variance = 0.0
            if self.layout.draws_noise:
                mean, log_variance = np.split(mean, 2, axis=2)
                variance = np.exp(log_variance)
            squares = mean**2 + variance
            sums.append([part.sum((0, 1, 3, 4)) for part in (mean, squares)])
        total, squares = np.sum(sums, axis=0)
        return {"sum": total.tolist(), "sum_of_squares": squares.tolist()}


def encoded_images(folder: Path, layout: Layout) -> dict[Path, list[int]]:
    """Indices of the images that are in each begun or finished shard, by its fingerprints."""
    found = {}
    for number in layout.shards:
        name, indices = shard_name(number), layout.indices(number)
        if (folder / f"{name}.bin").exists() and (folder / f"{name}.json").exists():
            bad = _read_facts(folder, layout, number).bad
        else:
            bad = _read_bad(folder / f"{name}.bad", indices)
        found[folder / f"{name}{SOURCES}"] = [index for index in indices if index not in bad]
    return found


def changed_line(changed: dict[Path, list[int]], source: Stored) -> str:
    """How many images changed since they were encoded, in words."""
    indices = [index for shard in changed.values() for index in shard]
    return (
        f"{len(indices):,} of {len(source):,} files changed since they were encoded (such as "
        f"{source.describe(indices[0])})"
    )


def remove_shard(records: Path) -> None:
    """Removes a shard, given its fingerprints, so that it is encoded again."""
    for end in (".json", ".bin", ".bin.partial", ".bad", SOURCES):
        records.with_suffix(end).unlink(missing_ok=True)


def check_folder(folder: Path) -> None:
    """Refuses a folder that holds what the cache would overwrite, and no cache."""
    if (folder / SETTINGS_FILE).exists():
        return
    for pattern in OWN_FILES:
        if foreign := next(folder.glob(pattern), None):
            raise UserError(
                f"out {folder} holds {foreign.name} but no latent cache ({SETTINGS_FILE}); choose "
                "another --out"
            )


def missing_shards(folder: Path, layout: Layout) -> list[int]:
    """Numbers of the shards that are not finished: a file of theirs is not there.

    Refuses a finished one that is not what was written.
    """
    missing = []
    for number in layout.shards:
        if all((folder / f"{shard_name(number)}{end}").exists() for end in (".bin", ".json")):
            _read_facts(folder, layout, number)
        else:
            missing.append(number)
    return missing


def bytes_to_write(folder: Path, layout: Layout) -> int:
    """How many bytes the folder still lacks, bad images counted as good ones."""
    files = [*folder.glob("shard_*.bin"), *folder.glob("shard_*.bin.partial")]
    there = sum(file.stat().st_size for file in files if file.is_file())
    return layout.count * layout.image_bytes - there


def left_out(folder: Path, layout: Layout) -> dict[int, str]:
    """Why the images that are in no shard cannot be decoded, by index; refuses many of them."""
    facts = [_read_facts(folder, layout, number) for number in layout.shards]
    bad = {index: reason for fact in facts for index, reason in fact.bad.items()}
    if len(bad) > MAX_BAD * layout.count:
        first = min(bad)
        raise UserError(
            f"{len(bad)} of {layout.count} images cannot be decoded, more than {MAX_BAD:.0%} "
            f"(first: {bad[first]}); mend the data set, then encode into a new folder"
        )
    return bad


def write_index(
    folder: Path, layout: Layout, settings: dict, labels: np.ndarray, bad: dict[int, str]
) -> None:
    """Labels, then the index, once every shard is there.

    settings: what the index keeps beside the shards. labels: of all images of the source, (N,).
    bad: those that are `left_out`.
    """
    facts = {number: _read_facts(folder, layout, number) for number in layout.shards}
    good = np.setdiff1d(np.arange(layout.count), list(bad))
    with replacing(folder / LABELS_FILE) as partial, partial.open("wb") as file:
        np.save(file, labels[good].astype(np.int64), allow_pickle=False)
    shards = [
        asdict(Shard(f"{shard_name(number)}.bin", fact.count, fact.sha256))
        for number, fact in facts.items()
        if fact.count
    ]
    index = {
        "schema": SCHEMA,
        "count": len(good),
        "bad_images": len(bad),
        "labels_sha256": file_hash(folder / LABELS_FILE),
        "raw_latents": _statistics(list(facts.values()), layout, len(good)),
        "versions": versions(),
    }
    write_json(folder / INDEX_FILE, index | settings | {"shards": shards})


def _read_facts(folder: Path, layout: Layout, number: int) -> Facts:
    """What `ShardWriter.finish` wrote of a shard, which must be there and fit it."""
    path, indices = folder / f"{shard_name(number)}.json", layout.indices(number)
    facts = read_json(path, Facts, remedy=CHANGED)
    if not (facts.bad.keys() <= set(indices) and facts.count + len(facts.bad) == len(indices)):
        raise UserError(
            f"{path} tells of {facts.count} images and {len(facts.bad)} bad ones, the shard has "
            f"{len(indices)}; {CHANGED}"
        )
    channels = layout.latent_channels if facts.count else 1
    if {len(facts.sum), len(facts.sum_of_squares)} != {channels}:
        raise UserError(f"{path} holds sums of other than {channels} channels; {CHANGED}")
    check_shard(folder / f"{shard_name(number)}.bin", facts.count * layout.image_bytes)
    return facts


def _read_bad(path: Path, indices: range) -> dict[int, str]:
    """The images of a begun shard that cannot be decoded, by index."""
    bad = read_json(path, dict[int, str], remedy=CHANGED) if path.exists() else {}
    if not bad.keys() <= set(indices):
        raise UserError(f"{path} names images of another shard; {CHANGED}")
    return bad


def _statistics(facts: list[Facts], layout: Layout, images: int) -> dict:
    """Mean and standard deviation of every channel before the normalisation."""
    values = images * layout.mirrors * int(np.prod(layout.moments_shape[1:]))
    mean = sum(np.asarray(fact.sum) for fact in facts) / values
    square = sum(np.asarray(fact.sum_of_squares) for fact in facts) / values
    variance = np.maximum(square - mean**2, 0)  # of equal images it may round to below 0
    return {"mean": mean.tolist(), "std": np.sqrt(variance).tolist()}
