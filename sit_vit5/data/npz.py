"""npz archives of images and labels, such as `sample/generate.py` and ADM write."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np

from sit_vit5.arrays import find_member, members
from sit_vit5.data.image_source import ArrayImages, number_classes
from sit_vit5.errors import UserError, listed, size_text

# Names of the arrays, the first found counts.
IMAGES, LABELS, CLASS_NAMES = ("images", "arr_0"), ("labels", "arr_1"), ("class_names",)
MAX_IN_MEMORY = 4 * 10**9  # bytes; a compressed array cannot be mapped


class Npz(ArrayImages):
    """`images` uint8 (N, H, W, 1 or 3) or (N, H, W), `labels` (N,), perhaps `class_names`.

    Images of an uncompressed archive are mapped, not read; those of a compressed one are held in
    memory by every process. Cropped after ADM where their size is not `image_size`.
    """

    def __init__(self, path: str | Path, image_size: int, *, unconditional: bool = False):
        self.path = Path(path)
        images = self._images()
        labels, class_names = (None, ()) if unconditional else self._classes(len(images))
        super().__init__(
            "npz",
            images,
            where=str(path),
            labels=labels,
            class_names=class_names,
            image_size=image_size,
            digest=self._digest(),
        )

    def __getstate__(self) -> dict:
        # A map would travel as its whole content.
        return {key: value for key, value in self.__dict__.items() if key != "images"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.images = self._images()

    def _images(self) -> np.ndarray:
        images = read_array(self.path, member(self.path, IMAGES))
        if images.ndim == 3:
            images = images[..., None]
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3):
            raise UserError(
                f"the images of {self.path} are {images.dtype} {images.shape}; expected uint8 "
                "(N, H, W), (N, H, W, 1) or (N, H, W, 3)"
            )
        if not images.size:
            raise UserError(f"{self.path} holds no image: {images.shape}")
        return images

    def _classes(self, count: int) -> tuple[np.ndarray, tuple[str, ...]]:
        values = read_array(self.path, member(self.path, LABELS))
        if values.shape != (count,):
            raise UserError(f"{self.path} holds labels {values.shape} for {count} images")
        if CLASS_NAMES[0] not in members(self.path) or values.dtype.kind == "U":
            return number_classes(values, str(self.path))
        if values.dtype.kind not in "iu":
            raise UserError(f"the labels of {self.path} are {values.dtype}; expected integers")
        names = read_array(self.path, member(self.path, CLASS_NAMES))
        if names.dtype.kind not in "iuU":
            raise UserError(f"the class names of {self.path} are {names.dtype}; expected texts")
        return values, tuple(str(name) for name in names.reshape(-1))

    def _digest(self) -> str:
        """Of the archive's own checksums: of gigabytes nothing is read."""
        sums = [f"{key} {info.CRC} {info.file_size}" for key, info in members(self.path).items()]
        return hashlib.sha256("\n".join(sorted(sums)).encode()).hexdigest()


def member(path: Path, names: tuple[str, ...]) -> zipfile.ZipInfo:
    """The first array there is of these names."""
    there = members(path)
    for name in names:
        if name in there:
            return there[name]
    hint = ", or train without classes (--data.unconditional True)" if names == LABELS else ""
    raise UserError(f"{path} holds {listed(there)}; expected {' or '.join(names)}{hint}")


def read_array(path: Path, info: zipfile.ZipInfo) -> np.ndarray:
    """An array of an npz, mapped if it is stored as it is; pickled objects are refused."""
    found = find_member(path, info)
    if found.start is not None:
        return found.map()
    if found.nbytes > MAX_IN_MEMORY:
        raise UserError(
            f"{found.described} takes {size_text(found.nbytes)} of memory; save it with "
            "np.savez, not compressed: then it is read in place"
        )
    return found.read()
