"""Features on the disk, so that another metric of the same images costs no second pass."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sit_vit5.files import sync, write_json

DEFAULT_FOLDER = "~/.cache/sit_vit5/features"
ABOUT = "about.json"


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
        """Those of the outputs that are kept, as memory maps; what is damaged is made anew.

        images: what identifies them; count: how many they are.
        """
        place = self._place(images, extractor)
        found = {output: _rows(place / f"{output}.npy", count) for output in outputs}
        found = {output: rows for output, rows in found.items() if rows is not None}
        if found:
            with suppress(OSError):  # a folder of another user's, or read-only
                os.utime(place)  # used last now
        return found

    def keep(self, images: str, extractor: dict, features: Mapping[str, np.ndarray]) -> None:
        """Writes features, each file in one step, then removes what is too much."""
        place = self._place(images, extractor)
        place.mkdir(parents=True, exist_ok=True)
        for output, rows in features.items():
            partial = place / f"{output}.{os.getpid()}.partial"
            try:
                with partial.open("wb") as file:
                    np.save(file, rows, allow_pickle=False)
                sync(partial)
                os.replace(partial, place / f"{output}.npy")
            finally:  # of a full disk nothing is left behind
                partial.unlink(missing_ok=True)
        write_json(place / ABOUT, {"images": images, "extractor": extractor})
        self._prune(place)

    def _place(self, images: str, extractor: dict) -> Path:
        text = json.dumps([images, extractor], sort_keys=True)
        return self.folder / hashlib.sha256(text.encode()).hexdigest()[:32]

    def _prune(self, newest: Path) -> None:
        """Removes folders of ours, longest unused first; never the one just written."""
        entries = [entry.parent for entry in self.folder.glob(f"*/{ABOUT}")]
        sizes = {entry: sum(file.stat().st_size for file in entry.iterdir()) for entry in entries}
        total = sum(sizes.values())
        for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime):
            if total > self.most_bytes and entry != newest:
                shutil.rmtree(entry, ignore_errors=True)
                total -= sizes[entry]


def _rows(path: Path, count: int) -> np.ndarray | None:
    """The rows in a file as a memory map; None if it is absent or holds anything else."""
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return rows if isinstance(rows, np.ndarray) and rows.shape[:1] == (count,) else None
