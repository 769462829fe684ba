"""Data sets as sources: a length, class names, and items by index.

A new source is one class and one line in `SOURCES`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from sit_vit5.config import DataConfig
from sit_vit5.data.digits import Digits
from sit_vit5.data.folder import ImageFolder
from sit_vit5.data.latent_cache import LatentCache, is_cache
from sit_vit5.errors import UserError, choose


class Source(Protocol):
    """A labelled data set.

    kind: "images" (uint8 (H, W, C) by `load`, encoded by the codec) or "moments" (of a
    `LatentCache`, by its `batch`). item_shape: (C, H, W) of an image, (c, h, w) of latents.
    labels: int64 (N,), all 0 where there are no class names.
    """

    kind: str
    identity: dict
    class_names: tuple[str, ...]
    item_shape: tuple[int, int, int]
    labels: np.ndarray

    def __len__(self) -> int: ...

    def describe(self, index: int) -> str:
        """What a person finds the item by: its file, or its place in one."""
        ...

    def load(self, index: int, *, mirror: bool = False) -> tuple[np.ndarray, int]:
        """Item, left and right exchanged if asked, and label; BadImage if it cannot be decoded."""
        ...


SOURCES: dict[str, Callable[[DataConfig], Source | LatentCache]] = {
    "digits": lambda data: Digits(
        "train", image_size=data.image_size, unconditional=data.unconditional
    ),
    "folder": lambda data: ImageFolder(
        needed_path(data), data.image_size, unconditional=data.unconditional
    ),
    "latents": lambda data: LatentCache(
        needed_path(data),
        image_size=data.image_size,
        mirrored=data.horizontal_flip,
        unconditional=data.unconditional,
    ),
}
# Sources that read no path.
BUILT_IN = ("digits",)


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
    return choose("data.source", name, SOURCES)(data)


def detect(path: Path) -> str:
    """The source that a path alone means."""
    return "latents" if is_cache(path) else "folder"


def needed_path(data: DataConfig) -> Path:
    """The path, for the sources that need one."""
    if data.path is None:
        raise UserError(f"data.source {data.source} needs --data.path PATH")
    return Path(data.path)
