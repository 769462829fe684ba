"""Data sets as sources: a length, class names, and items by index.

A new source is one class and one line in `SOURCES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from sit_vit5.config import DataConfig
from sit_vit5.data.digits import Digits
from sit_vit5.data.folder import ImageFolder
from sit_vit5.errors import UserError, choose


class Source(Protocol):
    """A labelled data set.

    kind: "images" (uint8 (H, W, C), encoded by the codec) or "latents" (fp32 (c, h, w), given to
    the model as they are: the place where a latent cache plugs in).
    """

    kind: str
    identity: dict
    class_names: tuple[str, ...]
    item_shape: tuple[int, int, int]

    def __len__(self) -> int: ...

    def load(self, index: int, *, mirror: bool = False) -> tuple[np.ndarray, int]:
        """Item, left and right exchanged if asked, and label; BadImage if it cannot be decoded."""
        ...


SOURCES: dict[str, Callable[[DataConfig], Source]] = {
    "digits": lambda data: Digits(
        "train", image_size=data.image_size, unconditional=data.unconditional
    ),
    "folder": lambda data: ImageFolder(
        data.path, data.image_size, unconditional=data.unconditional
    ),
}


def build_source(data: DataConfig) -> Source:
    """The training data that the configuration names."""
    if data.source is None and data.path is None:
        raise UserError(
            "no data given: use --data.path FOLDER (one sub-folder per class), or the built-in "
            "example that needs none: --config configs/digits.yaml"
        )
    if data.source is not None and data.source != "folder" and data.path is not None:
        raise UserError(f"data.path has no use with data.source {data.source}; drop one of them")
    return choose("data.source", data.source or "folder", SOURCES)(data)
