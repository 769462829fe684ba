"""Image folders: one sub-folder per class."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
from PIL import Image

from sit_vit5.data.image_source import ImageSource, in_order
from sit_vit5.data.images import EXTENSIONS, read_rgb
from sit_vit5.errors import UserError

# Names of parts of a data set, which are no classes.
SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}


class ImageFolder(ImageSource):
    """`path/CLASS/**/*.png`. Hidden folders and files are ignored.

    Classes are the sub-folders (none if `unconditional`), in alphabetical order, or in numeric
    order where all are numbers.
    """

    def __init__(self, path: str | Path, image_size: int, *, unconditional: bool = False):
        self.root = Path(path)
        if not self.root.is_dir():
            raise UserError(f"data folder {self.root} does not exist or is no folder")
        self.files, labels, class_names = (
            scan_flat(self.root) if unconditional else scan_classes(self.root)
        )
        listing = b"\n".join(os.fsencode(file.relative_to(self.root)) for file in self.files)
        super().__init__(
            "folder",
            labels=np.array(labels),
            class_names=class_names,
            channels=3,
            image_size=image_size,
            digest=hashlib.sha256(listing).hexdigest(),
        )

    def picture(self, index: int) -> Image.Image:
        return read_rgb(self.files[index])

    def describe(self, index: int) -> str:
        return str(self.files[index])


def scan_flat(root: Path) -> tuple[list[Path], list[int], tuple[str, ...]]:
    """All files below a folder, without classes."""
    files = list_images(root)
    if not files:
        raise UserError(f"data folder {root} holds no image (looked for {', '.join(EXTENSIONS)})")
    return files, [0] * len(files), ()


def scan_classes(root: Path) -> tuple[list[Path], list[int], tuple[str, ...]]:
    """Files, labels and class names below a folder of class folders."""
    loose = [entry for entry in root.iterdir() if is_image_name(entry.name) and entry.is_file()]
    names = [entry.name for entry in root.iterdir() if entry.is_dir() and entry.name[0] != "."]
    if loose or not names:
        found = f"{len(loose)} images such as {loose[0].name} lie" if loose else "nothing lies"
        raise UserError(
            f"{found} directly in data folder {root}, and {len(names)} class sub-folders; put "
            "every image in one sub-folder per class, or train without classes "
            "(--data.unconditional True)"
        )
    names = in_order(names)
    files, labels = [], []
    for label, name in enumerate(names):
        found = list_images(root / name)
        if not found:
            raise UserError(
                f"class folder {root / name} holds no image (looked for {', '.join(EXTENSIONS)}); "
                "remove it or fill it"
            )
        files += found
        labels += [label] * len(found)
    _check_level(root, names, files)
    return files, labels, tuple(names)


def _check_level(root: Path, names: list[str], files: list[Path]) -> None:
    """Refuses a root one level too high: what look like classes are parts of the data set."""
    nested = all(len(file.relative_to(root).parts) > 2 for file in files)
    if nested and (len(names) == 1 or SPLITS.issuperset(name.lower() for name in names)):
        inner = root / ("train" if "train" in names else names[0])
        count = sum(entry.is_dir() for entry in inner.iterdir())
        raise UserError(
            f"the only class folders of {root} are {', '.join(names)}, and {inner} holds {count} "
            f"sub-folders; did you mean --data.path {inner}?"
        )


def is_image_name(name: str) -> bool:
    """Whether a file's name, without its folders, is that of an image; not of hidden ones."""
    return name[0] != "." and name.lower().endswith(EXTENSIONS)


def list_images(folder: Path) -> list[Path]:
    """Image files at any depth, sorted; extensions in any case, hidden names ignored."""
    found = []
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        for name in folders:
            if _leads_back(Path(parent, name), folder):
                raise UserError(f"{Path(parent, name)} is a link to a folder it lies in; remove it")
        found += [Path(parent, name) for name in names if is_image_name(name)]
    return sorted(found)


def _leads_back(inner: Path, folder: Path) -> bool:
    """Whether it is a link to a folder above it, on the way from `folder` or on the disk."""
    if not inner.is_symlink():
        return False
    way = [above for above in inner.parents if above.is_relative_to(folder)]
    return any(above.resolve().is_relative_to(inner.resolve()) for above in way)


def _refuse(error: OSError) -> None:
    """A folder that cannot be read would be left out in silence."""
    raise UserError(f"{error.filename} cannot be read ({error.strerror}); mend or remove it")
