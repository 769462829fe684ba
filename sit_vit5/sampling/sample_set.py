"""A set of samples on disk that can be killed at any moment and gone on with.

FOLDER/samples.json             the manifest: written first, completed last
FOLDER/samples.partial/         images.npy and cost.npy, memory maps filled by index
FOLDER/samples.npz              arr_0, uint8 (N, H, W, C); the partial folder is then removed
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from PIL import Image

from sit_vit5.arrays import allocate_npy
from sit_vit5.errors import UserError
from sit_vit5.files import (
    check_plain,
    check_same,
    check_space,
    file_hash,
    remove_own,
    replacing,
    save_image,
    write_json,
)
from sit_vit5.progress import progress_bar
from sit_vit5.run_folder import ARCHIVE, MANIFEST, PARTIAL

IMAGES = "images.npy"
COST = "cost.npy"
PARTIAL_FILES = (IMAGES, COST, "*.npy.partial")


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
        manifest = self._read_manifest()
        begun = self._begun()
        if manifest is not None and begun:
            check_same(self.folder, manifest["settings"], self.settings, what="samples made")
            if manifest["complete"] and (self.folder / ARCHIVE).is_file():
                remove_own(self.partial, PARTIAL_FILES)  # a kill may have left it
                return True
        elif (self.folder / ARCHIVE).exists():
            raise UserError(
                f"{self.folder / ARCHIVE} exists without a manifest; choose another --out"
            )
        if not self.partial.exists():  # else the blocks are taken already
            need = 2 * self.count * int(np.prod(self.shape))  # twice while the archive is packed
            check_space(self.folder, need, f"{self.count} images", use="choose another --out")
        if self.partial.is_symlink():
            check_plain(self.partial)
        self.partial.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / MANIFEST, {"complete": False, "settings": self.settings})
        if not begun or not all((self.partial / name).is_file() for name in (IMAGES, COST)):
            # Costs last: an image counts as made only where both files are there.
            allocate_npy(self.partial / IMAGES, np.uint8, (self.count, *self.shape))
            allocate_npy(self.partial / COST, np.int32, (self.count, 2))
        return False

    def open(self) -> None:
        """Maps the images and their cost (velocity evaluations, network passes; 0: missing)."""
        self.images = self._map(IMAGES, (self.count, *self.shape))
        self.cost = self._map(COST, (self.count, 2))

    def missing(self, indices: Sequence[int]) -> bool:
        """Whether any of the images is yet to be made."""
        return bool((self.cost[indices[0] : indices[-1] + 1, 0] == 0).any())

    def write(self, indices: range, images: np.ndarray, evaluations: int, passes: int) -> None:
        """Puts images at their places; only then are they marked as made."""
        self.images[indices.start : indices.stop] = images
        self.images.flush()
        self.cost[indices.start : indices.stop] = (evaluations, passes)
        self.cost.flush()

    def done(self) -> int:
        """How many images are made."""
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

    def _read_manifest(self) -> dict | None:
        path = self.folder / MANIFEST
        if not path.is_file():
            return None
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            return {"settings": dict(manifest["settings"]), "complete": manifest["complete"]}
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is not a manifest of samples; choose another --out") from None

    def _begun(self) -> bool:
        """Whether any image is made: a first try that failed does not bind the folder."""
        if (self.folder / ARCHIVE).is_file():
            return True
        return (self.partial / COST).is_file() and bool((self._map(COST)[:, 0] > 0).any())

    def _map(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """The memory map of a partial file, of the expected shape if one is given."""
        path = self.partial / name
        check_plain(path)
        try:
            found = open_memmap(path, mode="r+")
        except (ValueError, EOFError) as error:
            raise UserError(f"{path} is damaged ({error}); remove its folder") from None
        if found.ndim < 2 or (shape is not None and found.shape != shape):
            raise UserError(f"{path} is damaged (shape {found.shape}); remove its folder")
        return found


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


def write_pngs(folder: Path) -> None:
    """The images of a complete set as `images/000000.png` and so on; those there are kept."""
    pixels = np.load(folder / ARCHIVE)["arr_0"]  # (N, H, W, C)
    place = folder / "images"
    place.mkdir(exist_ok=True)
    with progress_bar(len(pixels), unit="PNG") as bar:
        for number, image in enumerate(pixels):
            path = place / f"{number:06d}.png"
            if not path.exists():
                pixels = image.squeeze(-1) if image.shape[-1] == 1 else image
                save_image(path, Image.fromarray(pixels))
            bar.update()
