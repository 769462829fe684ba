"""A set of samples on disk that can be killed at any moment and gone on with.

FOLDER/samples.json             the manifest: written first, completed last
FOLDER/samples.partial/         images.npy and cost.npy, memory maps filled by index
FOLDER/samples.npz              arr_0, uint8 (N, H, W, C); the partial folder is then removed
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from sit_vit5.metrics.image_sets import npz_set
from sit_vit5.utils.arrays import allocate_npy, map_npy
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import (
    check_plain,
    check_same,
    check_space,
    file_hash,
    read_json,
    remove_own,
    replacing,
    save_image,
    write_json,
)
from sit_vit5.utils.progress import progress_bar
from sit_vit5.utils.run_folder import ARCHIVE, MANIFEST, PARTIAL
from sit_vit5.utils.streams import warn

IMAGES = "images.npy"
COST = "cost.npy"
PARTIAL_FILES = (IMAGES, COST, "*.npy.partial")
BATCH = 1024  # images that are looked at together
PNG_END = b"\0\0\0\0IEND\xaeB`\x82"


@dataclass(frozen=True)
class Manifest:
    """Fields of `samples.json` that decide whether a set can be continued."""

    complete: bool
    settings: dict
    samples_sha256: str | None = None


class SampleSet:
    """N images of one shape, made with one group of settings.

    settings: everything that decides the images, as JSON values. Another group is refused.
    """

    def __init__(self, folder: Path, settings: dict, *, count: int, shape: tuple[int, int, int]):
        self.folder, self.settings, self.count, self.shape = folder, settings, count, shape
        self.partial = folder / PARTIAL

    def prepare(self) -> bool:
        """Checks the folder and makes the memory maps; True if the set is complete already.

        Called on one process, before the others call `open`.
        """
        manifest, archive = self._read_manifest(), self.folder / ARCHIVE
        if manifest is None and archive.exists():
            raise UserError(f"{archive} exists without a manifest; choose another --out")
        begun = archive.is_file() or self._begun()
        if manifest is not None and begun:
            check_same(self.folder, manifest.settings, self.settings, what="samples made")
            if manifest.complete and archive.is_file():
                self._check_archive(manifest)
                remove_own(self.partial, PARTIAL_FILES)  # a kill may have left it
                return True
        if not self.partial.exists():  # else the blocks are taken already
            need = 2 * self.count * int(np.prod(self.shape))  # twice while the archive is packed
            check_space(self.folder, need, f"{self.count} images", use="choose another --out")
        if self.partial.is_symlink():
            check_plain(self.partial)
        self.partial.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / MANIFEST, {"complete": False, "settings": self.settings})
        if not begun or not self._has_parts():
            # Costs last: an image counts as made only where both files are there.
            allocate_npy(self.partial / IMAGES, np.uint8, (self.count, *self.shape))
            allocate_npy(self.partial / COST, np.int32, (self.count, 2))
        else:
            self._forget_black_images()
        return False

    def open(self) -> None:
        """Maps the images and their cost (velocity evaluations, network passes; 0: missing)."""
        self.images = self._map(IMAGES, np.uint8, (self.count, *self.shape))
        self.cost = self._map(COST, np.int32, (self.count, 2))

    def missing(self, indices: Sequence[int]) -> bool:
        """True if any of the images is missing."""
        return bool((self.cost[indices, 0] <= 0).any())

    def write(
        self, indices: Sequence[int], images: np.ndarray, evaluations: int, passes: int
    ) -> None:
        """Puts images at their places; only then are they marked as made."""
        self.images[indices] = images
        self.images.flush()
        self.cost[indices] = (evaluations, passes)
        self.cost.flush()

    def done(self) -> int:
        """Number of images made."""
        return int((self.cost[:, 0] > 0).sum())

    def finish(self, labels: list[int], facts: dict) -> Path:
        """Packs samples.npz and completes the manifest; on one process, when nothing is missing."""
        lacking = self.count - self.done()
        if lacking:
            raise UserError(
                f"{lacking} of {self.count} images are missing in {self.folder}; run the same "
                "command again to make them"
            )
        archive = self.folder / ARCHIVE
        _pack(self.partial / IMAGES, archive)
        evaluations, passes = self.cost.max(axis=0).tolist()
        manifest = {
            "complete": True,
            "settings": self.settings,
            "evaluations_per_image": evaluations,
            "network_passes_per_image": passes,
            "labels": labels,
            "samples_sha256": file_hash(archive),
            **facts,
        }
        write_json(self.folder / MANIFEST, manifest)
        del self.images, self.cost
        remove_own(self.partial, PARTIAL_FILES)
        return archive

    def _read_manifest(self) -> Manifest | None:
        path = self.folder / MANIFEST
        if not path.exists():
            return None
        return read_json(
            path, Manifest, remedy="it is not a manifest of samples; choose another --out"
        )

    def _check_archive(self, manifest: Manifest) -> None:
        """Refuses an archive that is not the one of its manifest, such as one copied in part."""
        archive = self.folder / ARCHIVE
        remedy = "remove it and run the same command again"
        if manifest.samples_sha256 not in (None, file_hash(archive)):
            raise UserError(f"{archive} is damaged: {MANIFEST} has another hash of it; {remedy}")
        found = npz_set(archive)
        if (found.count, found.shape) != (self.count, self.shape):
            raise UserError(
                f"{archive} holds {found.count} images of {found.shape}, its manifest tells of "
                f"{self.count} of {self.shape}; {remedy}"
            )

    def _has_parts(self) -> bool:
        return all((self.partial / name).is_file() for name in (IMAGES, COST))

    def _begun(self) -> bool:
        """True if any image is made: a failed first try does not bind the folder."""
        if not (self.partial / COST).is_file():
            return False
        return bool((self._map(COST, np.int32, (None, 2))[:, 0] > 0).any())

    def _forget_black_images(self) -> None:
        """Marks black images as missing: a copy that stopped, or a crash, leaves zeros.

        So is the image before one, whose end may be lacking. A model's own black image is made
        again, the same.
        """
        self.open()
        forgotten = 0
        for start in range(0, self.count, BATCH):
            part = slice(start, start + BATCH)
            made = self.cost[part, 0] > 0
            if not made.any():
                continue
            black = made & ~self.images[part].any(axis=(1, 2, 3))
            for place in start + np.flatnonzero(black):
                self.cost[max(place - 1, 0) : place + 1] = 0
            forgotten += int(black.sum())
        self.cost.flush()
        if forgotten:
            warn(f"{forgotten} images in {self.partial} are black; they are made again")

    def _map(self, name: str, dtype: type, shape: tuple[int | None, ...]) -> np.memmap:
        """The memory map of a partial file."""
        remedy = f"remove {self.partial} and run the same command again"
        return map_npy(self.partial / name, dtype, shape, mode="r+", remedy=remedy)


def _pack(images: Path, archive: Path) -> None:
    """An .npy file as `arr_0` of an uncompressed npz, copied in pieces."""
    arr_0 = zipfile.ZipInfo("arr_0.npy")  # dated 1980: the same images give the same file
    try:
        with replacing(archive) as partial, zipfile.ZipFile(partial, "w") as target:
            with images.open("rb") as source, target.open(arr_0, "w", force_zip64=True) as entry:
                shutil.copyfileobj(source, entry, length=1 << 24)
    except OSError as error:
        raise UserError(
            f"cannot pack {archive}: {error}; all images are kept: free disk space and run the "
            "same command again"
        ) from None


def write_pngs(folder: Path, numbers: Sequence[int]) -> None:
    """The images of a complete set as `images/000000.png` and so on; whole ones there stay.

    numbers: of the images, for the names.
    """
    images, place = npz_set(folder / ARCHIVE), folder / "images"
    if place.is_symlink():
        check_plain(place)
    place.mkdir(exist_ok=True)
    with progress_bar(images.count, unit="PNG") as bar:
        paths = (place / f"{number:06d}.png" for number in numbers)
        for batch in images.batches(BATCH):
            for image, path in zip(batch, paths, strict=False):
                if not (path.is_file() and path.read_bytes().endswith(PNG_END)):
                    grey = image.shape[-1] == 1
                    save_image(path, Image.fromarray(image.squeeze(-1) if grey else image))
                bar.update()
