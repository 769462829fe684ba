"""Image sources: the base of all, with checked labels and names, and folders of images."""

from __future__ import annotations

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from sit_vit5.data.fingerprints import stamp_of
from sit_vit5.data.transforms import (
    EXTENSIONS,
    MAX_PIXELS,
    BadImage,
    center_crop,
    describe_passed_over,
    is_image_name,
    kinds_passed_over,
    read_rgb,
)
from sit_vit5.utils.errors import UserError, listed
from sit_vit5.utils.run_folder import CHECKPOINTS, CONFIG_FILE

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


CHEAP_FILES = 10_000  # that are opened to compare their contents
# Words in the names of parts of a data set, which are no classes.
TRAINING, HELD_OUT = ("train", "training"), ("val", "valid", "validation", "test", "testing")


class ImageFolder(ImageSource):
    """`path/CLASS/**/*.png`. Hidden folders and files are ignored.

    Classes are the sub-folders (none if `unconditional`), in alphabetical order, or in numeric
    order where all are numbers.
    """

    def __init__(self, path: str | Path, image_size: int, *, unconditional: bool = False):
        self.root = Path(path)
        if not self.root.is_dir():
            raise UserError(f"data folder {self.root} does not exist or is no folder")
        if (self.root / CONFIG_FILE).is_file() and (self.root / CHECKPOINTS).is_dir():
            raise UserError(f"{self.root} is the folder of a training run; give a folder of images")
        listing = scan_flat(self.root) if unconditional else scan_classes(self.root)
        self.files = listing.files
        names = b"\n".join(os.fsencode(file.relative_to(self.root)) for file in self.files)
        super().__init__(
            "folder",
            labels=np.array(listing.labels),
            class_names=listing.class_names,
            channels=3,
            image_size=image_size,
            digest=hashlib.sha256(names).hexdigest(),
            passed_over=listing.passed_over,
            contents=_contents(self.files),
        )

    def picture(self, index: int) -> Image.Image:
        return read_rgb(self.files[index])

    def describe(self, index: int) -> str:
        return str(self.files[index])

    def coded(self, index: int) -> bytes:
        return _read(self.files[index])

    def stamp(self, index: int) -> int:
        return stamp_of(self.files[index])


@dataclass
class Listing:
    """Image files, their labels, and the kinds of the files that are none."""

    files: list[Path] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    class_names: tuple[str, ...] = ()
    passed_over: Counter[str] = field(default_factory=Counter)


def scan_flat(root: Path) -> Listing:
    """All files below a folder, without classes."""
    found = scan(root)
    if not found.files:
        raise UserError(_no_image(f"data folder {root}", found) + "; give another --data.path")
    found.labels = [0] * len(found.files)
    return found


def scan_classes(root: Path) -> Listing:
    """Files, labels and class names below a folder of class folders."""
    entries = [entry for entry in root.iterdir() if entry.name[0] != "."]
    names = in_order(entry.name for entry in entries if entry.is_dir())
    loose = [entry.name for entry in entries if not entry.is_dir()]
    for entry in entries:
        if entry.is_symlink() and not entry.exists():  # a class may be lost
            raise UserError(f"{entry} is a link to nothing; correct or remove it")
    images = [name for name in loose if is_image_name(name)]
    if images or not names:
        found = f"{len(images)} images such as {images[0]} lie" if images else "nothing lies"
        raise UserError(
            f"{found} directly in data folder {root}, and {len(names)} class sub-folders; put "
            "every image in one sub-folder per class, or train without classes "
            "(--data.unconditional True)"
        )
    whole = Listing(class_names=tuple(names), passed_over=kinds_passed_over(loose))
    empty = []
    for label, name in enumerate(names):
        found = scan(root / name)
        if not found.files:
            empty.append(_no_image(f"class folder {root / name}", found))
        whole.files += found.files
        whole.labels += [label] * len(found.files)
        whole.passed_over += found.passed_over
    _check_level(root, names, whole.files)
    if empty:
        raise UserError(f"{empty[0]}; remove it or fill it")
    return whole


def _check_level(root: Path, names: list[str], files: list[Path]) -> None:
    """Refuses a root one level too high: what look like classes are parts of the data set."""
    parts = [file.relative_to(root).parts for file in files]
    nested = {part[0] for part in parts if len(part) > 2}  # classes with sub-folders of images
    training = [name for name in names if _is_part(name, TRAINING)]
    splits = [name for name in names if _is_part(name, TRAINING + HELD_OUT)]
    alone = len(names) == 1 and len(nested) == 1 and all(len(part) > 2 for part in parts)
    # A part that is kept aside may be flat, as ImageNet's validation images are.
    if alone or (nested & set(splits) and (len(splits) > len(training) > 0 or splits == names)):
        inner = root / next(iter(training or names))
        count = sum(entry.is_dir() for entry in inner.iterdir())
        raise UserError(
            f"the class folders of {root} are {listed(names)}, and {inner} holds {count} "
            f"sub-folders; did you mean --data.path {inner}?"
        )


def _is_part(name: str, words: tuple[str, ...]) -> bool:
    """Whether a folder is named as a part of a data set: Training, ILSVRC2012_img_val, val2017."""
    return any(word in words for word in re.split(r"[^a-z]+", name.lower()))


def _no_image(place: str, found: Listing) -> str:
    others = describe_passed_over(found.passed_over)
    return f"{place} holds no image (looked for {', '.join(EXTENSIONS)})" + (
        f"; {others}" if others else ""
    )


def scan(folder: Path) -> Listing:
    """Image files at any depth, sorted; extensions in any case, hidden names ignored."""
    found = Listing()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        for name in folders:
            if _leads_back(Path(parent, name), folder):
                raise UserError(f"{Path(parent, name)} is a link to a folder it lies in; remove it")
        found.files += [Path(parent, name) for name in names if is_image_name(name)]
        found.passed_over += kinds_passed_over(names)
    found.files.sort()
    return found


def list_images(folder: Path) -> list[Path]:
    """The image files of `scan`."""
    return scan(folder).files


def _contents(files: list[Path]) -> str | None:
    if len(files) > CHEAP_FILES:
        return None
    total = sum(file.stat().st_size for file in files if file.is_file())
    return hash_contents(map(_read, files), total)


def _read(file: Path) -> bytes:
    """The bytes of a file; of what is no file or cannot be read none."""
    try:
        return file.read_bytes() if file.is_file() else b""
    except OSError:
        return b""


def _leads_back(inner: Path, folder: Path) -> bool:
    """Whether it is a link to a folder above it, on the way from `folder` or on the disk."""
    if not inner.is_symlink():
        return False
    way = [above for above in inner.parents if above.is_relative_to(folder)]
    return any(above.resolve().is_relative_to(inner.resolve()) for above in way)


def _refuse(error: OSError) -> None:
    """A folder that cannot be read would be left out in silence."""
    raise UserError(f"{error.filename} cannot be read ({error.strerror}); mend or remove it")
