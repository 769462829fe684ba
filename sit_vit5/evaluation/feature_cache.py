"""Features on the disk, so that another metric of the same images costs no second pass."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from sit_vit5.errors import UserError
from sit_vit5.evaluation.observing import SEEN
from sit_vit5.files import file_hash, read_json, remove_own, sync
from sit_vit5.metrics.extractors import LOGITS, POOL, SPATIAL

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
        """What `about.json` says; None where it is absent or not ours."""
        try:
            return read_json(folder / ABOUT, About)
        except UserError:
            return None


@dataclass(frozen=True)
class FeatureCache:
    """A folder per set of images and extractor: `pool.npy` and the like, and what they are of.

    most_bytes: when more lie there, those unused for longest are removed. 50,000 images take 0.4 GB
    of Inception's pool features, 0.4 GB of spatial ones and 0.2 GB of logits.
    """

    folder: Path
    most_bytes: int

    def find(
        self, images: str, extractor: dict, outputs: Sequence[str], count: int
    ) -> dict[str, np.ndarray]:
        """The cached outputs, as memory maps. A file whose hash differs is not used.

        images: what identifies them; count: how many they are.
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
        """Writes features, each file in one step, then removes what is too much."""
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
        """Removes folders of ours, longest unused first; never the one just written.

        The cache may lie in a folder of the user's: whatever else is there stays.
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
