"""Images to features. A new extractor is one file and one line in `EXTRACTORS`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sit_vit5.metrics.features.base import LOGITS, POOL, SPATIAL, Extractor
from sit_vit5.metrics.features.inception import Inception, find_inception_weights
from sit_vit5.metrics.features.pixels import Pixels
from sit_vit5.metrics.features.timm import DINOv2, TimmModel
from sit_vit5.utils.errors import UserError, choose

__all__ = [
    "EXTRACTORS",
    "LOGITS",
    "POOL",
    "SPATIAL",
    "Extractor",
    "build_extractor",
    "find_inception_weights",
]

# Name -> extractor of a weights file; timm's takes the model's name too: `timm:NAME`.
EXTRACTORS: dict[str, Callable[..., Extractor]] = {
    "pixels": Pixels,
    "inception": Inception,
    "dinov2": DINOv2,
    "timm": TimmModel,
}


def build_extractor(
    name: str, weights: str | Path | None = None, *, option: str = "--weights"
) -> Extractor:
    """The extractor called `name`; weights: a local file instead of a library's cache.

    option: the command's option for that file, which an error names.
    """
    family, _, model = name.partition(":")
    build = choose("features", family, EXTRACTORS)
    if bool(model) != (family == "timm"):
        raise UserError(f"unknown features {name!r}; timm takes a model's name, such as timm:NAME")
    arguments = (model, weights) if model else (weights,)
    return build(*arguments, option=option)
