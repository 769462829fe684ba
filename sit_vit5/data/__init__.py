"""Data sets as sources: a length, class names, and items by index.

A new source is one class and one line in `SOURCES`.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

import numpy as np

from sit_vit5.config import DataConfig
from sit_vit5.data.array_sources import Digits, Npz, open_fashion_mnist, open_idx
from sit_vit5.data.huggingface import open_hugging_face
from sit_vit5.data.latent_cache import LatentCache, is_cache
from sit_vit5.data.sources import ImageFolder
from sit_vit5.data.webdataset import TarShards
from sit_vit5.utils.errors import UserError, choose


class Source(Protocol):
    """A labelled data set.

    kind: "images" (uint8 (H, W, C) by `load`, encoded by the codec) or "moments" (of a
    `LatentCache`, by its `batch`). item_shape: (C, H, W) of an image, (c, h, w) of latents.
    labels: int64 (N,), all 0 where there are no class names. notes: lines for whoever uses it.
    """

    kind: str
    identity: dict
    class_names: tuple[str, ...]
    item_shape: tuple[int, int, int]
    labels: np.ndarray
    notes: tuple[str, ...]

    def __len__(self) -> int: ...

    def describe(self, index: int) -> str:
        """What a person finds the item by: its file, or its place in one."""
        ...

    def load(self, index: int, *, mirror: bool = False) -> tuple[np.ndarray, int]:
        """Item, left and right exchanged if asked, and label; BadImage if it cannot be decoded."""
        ...


SOURCES: dict[str, Callable[[DataConfig], Source | LatentCache]] = {
    "digits": lambda data: Digits(
        data.split, image_size=data.image_size, unconditional=data.unconditional
    ),
    "fashion-mnist": lambda data: open_fashion_mnist(
        data.path, data.image_size, split=data.split, unconditional=data.unconditional
    ),
    "folder": lambda data: ImageFolder(
        needed_path(data), data.image_size, unconditional=data.unconditional
    ),
    "huggingface": lambda data: open_hugging_face(
        str(needed_path(data)),
        data.image_size,
        split=data.split,
        image_column=data.image_column,
        label_column=data.label_column,
        unconditional=data.unconditional,
    ),
    "idx": lambda data: open_idx(
        needed_path(data), data.image_size, split=data.split, unconditional=data.unconditional
    ),
    "latents": lambda data: LatentCache(
        needed_path(data),
        image_size=data.image_size,
        mirrored=data.horizontal_flip,
        unconditional=data.unconditional,
    ),
    "npz": lambda data: Npz(needed_path(data), data.image_size, unconditional=data.unconditional),
    "webdataset": lambda data: TarShards(
        needed_path(data), data.image_size, unconditional=data.unconditional
    ),
}
# Sources that read no path.
BUILT_IN = ("digits",)
# Options that only some sources read.
READ_BY = {
    "split": ("digits", "fashion-mnist", "huggingface", "idx"),
    "image_column": ("huggingface",),
    "label_column": ("huggingface",),
}
# What a path means: patterns of its name, or, for a folder, of a name in it.
FILES = {
    "*.npz": "npz",
    "*.tar": "webdataset",
    "*.parquet": "huggingface",
    "*idx3-ubyte*": "idx",
}
INNER_FILES = {
    "dataset_dict.json": "huggingface",
    "state.json": "huggingface",
    "dataset_info.json": "huggingface",
    "*.parquet": "huggingface",
    "*.tar": "webdataset",
    "*idx3-ubyte*": "idx",
}


def build_source(data: DataConfig) -> Source | LatentCache:
    """The training data that the configuration names."""
    if data.source is None and data.path is None:
        raise UserError(
            "no data given: use --data.path PATH (a folder with one sub-folder per class, ...), or "
            "the built-in example that needs none: --config configs/digits.yaml"
        )
    if data.source in BUILT_IN and data.path is not None:
        raise UserError(f"data.path has no use with data.source {data.source}; drop one of them")
    name = data.source or detect(Path(data.path))
    build = choose("data.source", name, SOURCES)
    for option, sources in READ_BY.items():
        value = getattr(data, option)
        if value != getattr(DataConfig, option) and name not in sources:
            raise UserError(
                f"data.{option} {value} has no use with data.source {name}; it is for "
                f"{', '.join(sources)}"
            )
    return build(data)


def same_data(before: dict, now: dict) -> bool:
    """Whether two identities are of the same data; of an older version there are no contents."""
    missing = {"contents"} - (before.keys() & now.keys())
    return all(before.get(key) == now.get(key) for key in (before.keys() | now.keys()) - missing)


def detect(path: Path) -> str:
    """The source that a path alone means."""
    if is_cache(path):
        return "latents"
    patterns, names = FILES, [path.name]
    if path.is_dir():
        names = [entry.name for entry in path.iterdir() if entry.name[0] != "."]
        patterns = INNER_FILES
    for pattern, source in patterns.items():
        if any(fnmatch(name, pattern) for name in names):
            fashion = source == "idx" and "fashion" in "/".join(path.absolute().parts[-3:]).lower()
            return "fashion-mnist" if fashion else source
    if path.is_dir():
        return "folder"
    if not path.exists():
        raise UserError(
            f"{path} does not exist; a data set of the Hugging Face hub needs "
            "--data.source huggingface"
        )
    raise UserError(f"{path} is of no known kind; expected a folder or one of {', '.join(FILES)}")


def needed_path(data: DataConfig) -> Path:
    """The path, for the sources that need one."""
    if data.path is None:
        raise UserError(f"data.source {data.source} needs --data.path PATH")
    return Path(data.path)
