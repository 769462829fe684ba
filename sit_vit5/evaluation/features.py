"""Features of images in one pass over the processes, with a cache on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from sit_vit5.evaluation.inputs import FileSet
from sit_vit5.evaluation.observations import SEEN, Observing
from sit_vit5.metrics.accumulator import (
    describe,
    extract_features,
    extract_statistics,
    feature_batches,
    merge_statistics,
)
from sit_vit5.metrics.features import LOGITS, POOL, SPATIAL
from sit_vit5.metrics.image_sets import ImageSet
from sit_vit5.metrics.metric import FeatureSet
from sit_vit5.metrics.statistics import Statistics
from sit_vit5.utils.distributed import Processes, agree, alone, gather
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import file_hash, read_json, remove_own, sync
from sit_vit5.utils.streams import warn

DEFAULT_FOLDER = "~/.cache/sit_vit5/features"
ABOUT = "about.json"
# The name of a folder of ours, and the files that it may hold.
_NAME = re.compile(r"[0-9a-f]{32}")
_OUTPUTS = (POOL, SPATIAL, LOGITS, SEEN)
_FILES = (
    *(f"{output}.npy" for output in _OUTPUTS),
    *(f"{name}.*.partial" for name in (*_OUTPUTS, ABOUT)),
    ABOUT,
)


@dataclass(frozen=True)
class About:
    """Content of a folder: what identifies the images, the extractor, the hash of each file."""

    images: str
    extractor: dict
    sha256: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def read(folder: Path) -> About | None:
        """Read `about.json`; None if it is absent or not ours."""
        try:
            return read_json(folder / ABOUT, About)
        except UserError:
            return None


@dataclass(frozen=True)
class FeatureCache:
    """One folder per image set and extractor: `pool.npy` and the like, and their identity.

    most_bytes: beyond it, the least recently used folders are removed. 50,000 images take 0.4 GB
    of Inception's pool features, 0.4 GB of spatial ones and 0.2 GB of logits.
    """

    folder: Path
    most_bytes: int

    def find(
        self, images: str, extractor: dict, outputs: Sequence[str], count: int
    ) -> dict[str, np.ndarray]:
        """Return the cached outputs as memory maps. A file whose hash differs is ignored.

        images: their identity; count: their number.
        """
        place = self._place(images, extractor)
        about = About.read(place)
        if about is None:
            return {}
        paths = {output: place / f"{output}.npy" for output in outputs}
        found = {output: _rows(path, about, count) for output, path in paths.items()}
        found = {output: rows for output, rows in found.items() if rows is not None}
        if found:
            with suppress(OSError):  # a folder of another user's, or read-only
                os.utime(place)  # used last now
        return found

    def keep(self, images: str, extractor: dict, features: Mapping[str, np.ndarray]) -> None:
        """Write features, each file atomically, then prune the cache."""
        place = self._place(images, extractor)
        place.mkdir(parents=True, exist_ok=True)
        # Another evaluation may be writing the same files now.
        suffix = f"{secrets.token_hex(4)}.partial"
        partials = {f"{output}.npy": place / f"{output}.{suffix}" for output in features}
        try:
            for rows, partial in zip(features.values(), partials.values(), strict=True):
                with partial.open("wb") as file:
                    np.save(file, rows, allow_pickle=False)
                sync(partial)
            before = About.read(place)
            hashes = {name: file_hash(partial) for name, partial in partials.items()}
            about = About(images, extractor, (before.sha256 if before else {}) | hashes)
            partials[ABOUT] = place / f"{ABOUT}.{suffix}"
            partials[ABOUT].write_text(json.dumps(asdict(about), indent=2), encoding="utf-8")
            for name, partial in partials.items():
                os.replace(partial, place / name)
        finally:  # a full disk leaves nothing behind
            for partial in partials.values():
                partial.unlink(missing_ok=True)
        self._prune(place)

    def _place(self, images: str, extractor: dict) -> Path:
        text = json.dumps([images, extractor], sort_keys=True)
        return self.folder / hashlib.sha256(text.encode()).hexdigest()[:32]

    def _prune(self, newest: Path) -> None:
        """Remove our least recently used folders, never the newest.

        The cache may be in a folder of the user's: any other file there stays.
        """
        used, sizes = {}, {}
        for entry in filter(_is_own, self.folder.iterdir()):
            with suppress(FileNotFoundError):  # another evaluation removes it
                sizes[entry] = sum(file.stat().st_size for file in entry.iterdir())
                used[entry] = entry.stat().st_mtime
        total = sum(sizes.values())
        for entry in sorted(used, key=used.get):
            if total > self.most_bytes and entry != newest:
                with suppress(OSError):
                    remove_own(entry, _FILES)
                total -= sizes[entry]


def _is_own(entry: Path) -> bool:
    return bool(_NAME.fullmatch(entry.name)) and not entry.is_symlink() and bool(About.read(entry))


def _rows(path: Path, about: About, count: int) -> np.ndarray | None:
    """Features (count, D) of a file as a memory map; None if it is absent or damaged."""
    try:
        if file_hash(path) != about.sha256.get(path.name):
            return None
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return rows if rows.ndim == 2 and len(rows) == count else None


# Beyond it only statistics are computed: features of more images would fill the memory.
MOST_ROWS = 100_000


@dataclass(frozen=True)
class Pass:
    """Feature extraction for any image set.

    cache: None stores nothing; batch_size: images per call of the extractor. Batches start at its
    multiples for any number of processes, which therefore changes no bit; the batch size itself
    changes the last bits of a network's features.
    """

    extractor: Observing
    batch_size: int
    cache: FeatureCache | None = None
    processes: Processes = field(default_factory=alone)

    def describe(
        self,
        images: ImageSet,
        *,
        rows: Sequence[str],
        statistics: Sequence[str],
        identity: str | None,
        title: str,
    ) -> FeatureSet:
        """Return features and statistics of these outputs, and `SEEN`; on the main process only.

        identity: key of these images in the cache; None stores nothing.
        """
        outputs = tuple(dict.fromkeys([*rows, *statistics]))
        if images.count > MOST_ROWS:
            return FeatureSet(statistics=self._statistics(images, outputs, title))
        features = self._features(images, (*outputs, SEEN), identity, title)
        return describe(features, statistics) if self.processes.is_main else FeatureSet()

    def stream(
        self, images: ImageSet, outputs: Sequence[str], title: str
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yield this process's share batch by batch, each with the index of its first image."""
        share = self._share(images.count)
        if share:
            batches = feature_batches(
                self.extractor, self._batches(images, share), **self._how(outputs, title, share)
            )
            yield from zip(share[:: self.batch_size], batches, strict=True)

    def _features(
        self, images: ImageSet, outputs: Sequence[str], identity: str | None, title: str
    ) -> dict[str, np.ndarray]:
        """Return all features on the main process, in the images' order; nothing on the others."""
        cache = self.cache if identity is not None else None
        found, extractor = {}, self.extractor.identity
        with agree(self.processes):
            if cache and self.processes.is_main:
                found = cache.find(identity, extractor, outputs, images.count)
            (kept,) = gather([tuple(found)], self.processes)[:1]
        missing = [output for output in outputs if output not in kept]
        if missing:
            made = self._extract(images, missing, title)
            if cache and self.processes.is_main:
                try:
                    cache.keep(identity, extractor, made)
                except OSError as error:  # a full disk must not cost the hours of the pass
                    warn(f"features of {title} are not kept: {error}")
            found |= made
        return found

    def _extract(
        self, images: ImageSet, outputs: Sequence[str], title: str
    ) -> dict[str, np.ndarray]:
        share, own = self._share(images.count), {}
        with agree(self.processes):
            if share:
                own = extract_features(
                    self.extractor, self._batches(images, share), **self._how(outputs, title, share)
                )
        parts = gather([(share.start, own)], self.processes)
        if not self.processes.is_main:
            return {}
        parts = [part for _, part in sorted(parts, key=lambda part: part[0]) if part]
        features = {
            output: parts[0][output]
            if len(parts) == 1
            else np.concatenate([part[output] for part in parts])
            for output in outputs
        }
        # Each image exactly once: no padding, no repeats.
        assert all(len(found) == images.count for found in features.values())
        return features

    def _statistics(
        self, images: ImageSet, outputs: Sequence[str], title: str
    ) -> dict[str, Statistics]:
        share, own = self._share(images.count), {}
        with agree(self.processes):
            if share:
                own = extract_statistics(
                    self.extractor, self._batches(images, share), **self._how(outputs, title, share)
                )
        parts = [part for part in gather([own], self.processes) if part]
        return {output: merge_statistics([part[output] for part in parts]) for output in outputs}

    def _share(self, count: int) -> range:
        """This process's images: whole batches, one contiguous run."""
        batches = -(-count // self.batch_size)
        cuts = [
            min(batches * rank // self.processes.count * self.batch_size, count)
            for rank in (self.processes.rank, self.processes.rank + 1)
        ]
        return range(*cuts)

    def _batches(self, images: ImageSet, share: range) -> Iterator[np.ndarray]:
        return read_ahead(images.batches(self.batch_size, share.start, share.stop))

    def _how(self, outputs: Sequence[str], title: str, share: range) -> dict:
        shown = self.processes.is_main
        return {"title": title, "total": len(share), "outputs": outputs, "shown": shown}


def read_ahead(batches: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the same batches; a thread decodes the next one while this one is processed."""
    with ThreadPoolExecutor(1) as reader:
        following = reader.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = reader.submit(next, batches, None)
            yield batch


def identity_of(images: ImageSet, sha256: str | None) -> str | None:
    """Cache key of images: their file's hash, or the hash of names, sizes and times of files.

    It includes the inode change time, which no copying command resets.
    """
    if sha256 is not None:
        return sha256
    if not isinstance(images, FileSet):
        return None
    digest = hashlib.sha256()
    for file in images.files:
        facts = file.stat()
        numbers = (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)
        digest.update(os.fsencode(file.resolve()) + f"\0{numbers}\n".encode())
    return f"files {digest.hexdigest()}"
