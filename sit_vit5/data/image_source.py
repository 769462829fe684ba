"""What all sources of images share: checked labels and names, one way to pixels."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable

import numpy as np
from PIL import Image

from sit_vit5.data.images import MAX_PIXELS, BadImage, center_crop, describe_passed_over
from sit_vit5.errors import UserError

CHEAP_BYTES = 256 * 10**6  # of images that are read to compare their contents: half a second


class ImageSource(ABC):
    """A `Source` of images cropped after ADM; a subclass finds them, by `picture` and `describe`.

    source, digest: what the identity says of the data. labels: integers (N,), 0 without classes.
    contents: hash of the images' bytes, if digest is not of them; None where there are many.
    passed_over: kinds of the files that are no images. notes: lines for whoever uses the data.
    """

    kind = "images"

    def __init__(
        self,
        source: str,
        *,
        labels: np.ndarray,
        class_names: Iterable[str],
        channels: int,
        image_size: int,
        digest: str,
        passed_over: Counter[str] | None = None,
        contents: str | None = None,
    ):
        self.size, self.item_shape = image_size, (channels, image_size, image_size)
        self.class_names = checked_names(class_names)
        self.labels = labels.astype(np.int64)
        self._check_labels()
        others = describe_passed_over(passed_over or Counter())
        self.notes = (f"note: {others}",) if others else ()
        self.identity = {
            "source": source,
            "count": len(labels),
            "image_size": image_size,
            "sha256": digest,
        }
        if contents is not None:
            self.identity["contents"] = contents

    @abstractmethod
    def picture(self, index: int) -> Image.Image:
        """The whole image, RGB or grey; BadImage if it cannot be decoded."""

    @abstractmethod
    def coded(self, index: int) -> bytes:
        """The image as it is stored."""

    @abstractmethod
    def stamp(self, index: int) -> int:
        """Changes whenever the stored image does; see `fingerprints`."""

    @abstractmethod
    def describe(self, index: int) -> str:
        """What a person finds the image by."""

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, index: int, *, mirror: bool = False) -> tuple[np.ndarray, int]:
        """uint8 (H, W, C), left and right exchanged if asked, and label."""
        picture = self.checked_picture(index)
        pixels = center_crop(picture, self.size).reshape(self.size, self.size, -1)
        return pixels[:, ::-1] if mirror else pixels, int(self.labels[index])

    def checked_picture(self, index: int) -> Image.Image:
        """The whole image; BadImage too where it cannot be cropped."""
        picture = self.picture(index)
        # The crop makes the short side `size` long: a line of pixels would become gigabytes.
        if self.size**2 * max(picture.size) > MAX_PIXELS * min(picture.size):
            width, height = picture.size
            raise BadImage(self.describe(index), f"{width}x{height} is too narrow for a square")
        return picture

    def _check_labels(self) -> None:
        count = max(len(self.class_names), 1)
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= count))
        if len(wrong):
            raise UserError(
                f"{self.describe(int(wrong[0]))}: label {self.labels[wrong[0]]} is not in "
                f"0..{count - 1}; correct it, or train without classes (--data.unconditional True)"
            )


class ArrayImages(ImageSource):
    """A source whose images are an array, uint8 (N, H, W, C), in memory or mapped.

    where: the name of the array in messages.
    """

    def __init__(
        self,
        source: str,
        images: np.ndarray,
        *,
        where: str,
        labels: np.ndarray | None,
        class_names: Iterable[str],
        image_size: int,
        digest: str,
    ):
        self.images, self.where = images, where
        super().__init__(
            source,
            labels=np.zeros(len(images), np.int64) if labels is None else labels,
            class_names=class_names,
            channels=images.shape[-1],
            image_size=image_size,
            digest=digest,
        )

    def picture(self, index: int) -> Image.Image:
        image = self.images[index]
        return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)

    def describe(self, index: int) -> str:
        return f"image {index} of {self.where}"

    def coded(self, index: int) -> bytes:
        return np.ascontiguousarray(self.images[index]).tobytes()

    def stamp(self, index: int) -> int:
        return int(self.identity["sha256"][:15], 16)  # it is of the images


def hash_contents(pieces: Iterable[bytes], total: int) -> str | None:
    """Hash of the images' bytes, `total` of them; None where reading them would take long."""
    if total > CHEAP_BYTES:
        return None
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(hashlib.sha256(piece).digest())
    return digest.hexdigest()


def checked_names(names: Iterable[str]) -> tuple[str, ...]:
    """Class names: printable, each given once."""
    names = tuple(names)
    for name in names:
        if not name.isprintable() or not name:
            raise UserError(f"class name {name!r} is not printable text; rename it")
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise UserError(f"class name {twice!r} is given twice; rename one of them")
    return names


def in_order(names: Iterable[str]) -> list[str]:
    """Names in alphabetical order, or in numeric order where all are numbers: 9 before 10."""
    names = list(names)
    numeric = all(name.isdecimal() and len(name) < 1000 for name in names)
    return sorted(names, key=lambda name: (int(name), name) if numeric else name)


def number_classes(values: np.ndarray, where: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels 0, 1, ... and class names, of a value per image, (N,), integers from 0 or texts."""
    if values.ndim != 1 or values.dtype.kind not in "biuU":
        raise UserError(
            f"the labels of {where} are {values.dtype} {values.shape}; expected an integer or a "
            "text per image"
        )
    found, places = np.unique(values, return_inverse=True)
    if found.dtype.kind == "i" and found[0] < 0:
        raise UserError(
            f"{where} has the label {found[0]}; expected 0 or above; without labels use "
            "--data.unconditional True"
        )
    names = [str(value) for value in found]
    ordered = in_order(names)
    numbers = {name: number for number, name in enumerate(ordered)}
    return np.array([numbers[name] for name in names])[places], tuple(ordered)
