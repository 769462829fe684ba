"""Image folders: one sub-folder per class."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from sit_vit5.data.images import EXTENSIONS, center_crop, read_rgb
from sit_vit5.errors import UserError


class ImageFolder:
    """`path/CLASS/**/*.png`, cropped after ADM. Hidden folders and files are ignored.

    Classes are the sub-folders (none if `unconditional`), in alphabetical order, or in numeric
    order where all are numbers.
    """

    kind = "images"

    def __init__(self, path: str | Path, image_size: int, *, unconditional: bool = False):
        self.root = Path(path)
        if not self.root.is_dir():
            raise UserError(f"data folder {self.root} does not exist or is no folder")
        self.size = image_size
        self.item_shape = (3, image_size, image_size)
        files, labels, self.class_names = (
            scan_flat(self.root) if unconditional else scan_classes(self.root)
        )
        self.files, self.labels = files, np.array(labels)
        listing = b"\n".join(os.fsencode(file.relative_to(self.root)) for file in files)
        self.identity = {
            "source": "folder",
            "count": len(files),
            "image_size": image_size,
            "sha256": hashlib.sha256(listing).hexdigest(),
        }

    def __len__(self) -> int:
        return len(self.files)

    def describe(self, index: int) -> str:
        return str(self.files[index])

    def load(self, index: int, *, mirror: bool = False) -> tuple[np.ndarray, int]:
        image = center_crop(read_rgb(self.files[index]), self.size)
        return image[:, ::-1] if mirror else image, int(self.labels[index])


def scan_flat(root: Path) -> tuple[list[Path], list[int], tuple[str, ...]]:
    """All files below a folder, without classes."""
    files = list_images(root)
    if not files:
        raise UserError(f"data folder {root} holds no image (looked for {', '.join(EXTENSIONS)})")
    return files, [0] * len(files), ()


def scan_classes(root: Path) -> tuple[list[Path], list[int], tuple[str, ...]]:
    """Files, labels and class names below a folder of class folders."""
    loose = [entry for entry in root.iterdir() if entry.is_file() and _is_image(entry.name)]
    folders = [entry for entry in root.iterdir() if entry.is_dir() and entry.name[0] != "."]
    numeric = all(folder.name.isdecimal() for folder in folders)
    folders.sort(key=lambda folder: (int(folder.name), folder.name) if numeric else folder.name)
    if loose or not folders:
        found = f"{len(loose)} images such as {loose[0].name} lie" if loose else "nothing lies"
        raise UserError(
            f"{found} directly in data folder {root}, and {len(folders)} class sub-folders; put "
            "every image in one sub-folder per class, or train without classes "
            "(--data.unconditional True)"
        )
    files, labels = [], []
    for label, folder in enumerate(folders):
        if not folder.name.isprintable():
            raise UserError(f"class folder name {folder.name!r} is not printable text; rename it")
        found = list_images(folder)
        if not found:
            raise UserError(
                f"class folder {folder} holds no image (looked for {', '.join(EXTENSIONS)}); "
                "remove it or fill it"
            )
        files += found
        labels += [label] * len(found)
    return files, labels, tuple(folder.name for folder in folders)


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def list_images(folder: Path) -> list[Path]:
    """Image files at any depth, sorted; extensions in any case, hidden names ignored."""
    found = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        for name in folders:
            inner = Path(parent, name)
            if inner.is_symlink() and Path(parent).resolve().is_relative_to(inner.resolve()):
                raise UserError(f"{inner} is a link to a folder it lies in; remove it")
        found += [Path(parent, name) for name in names if name[0] != "." and _is_image(name)]
    return sorted(found)
