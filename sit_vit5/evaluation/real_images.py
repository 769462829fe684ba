"""Real data sets for evaluation, through the loader and the crop of training (row E21)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sit_vit5.config import RealImagesConfig
from sit_vit5.data import Source, build_source
from sit_vit5.data.images import refusal
from sit_vit5.data.visits import Visit, visits
from sit_vit5.errors import UserError


def open_source(options: RealImagesConfig, path: str) -> Source:
    """The images of a data set; a latent cache has none."""
    source = build_source(options.loader(path))
    if source.kind != "images":
        raise UserError(f"{path} is a latent cache; give the images that it was made from")
    return source


def image_shape(source: Source) -> tuple[int, int, int]:
    """(H, W, C) of a source's images."""
    channels, height, width = source.item_shape
    return height, width, channels


def visit_images(
    source: Source, batches: Sequence[Sequence[int]], options: RealImagesConfig
) -> Iterator[Visit]:
    """The batches of indices, decoded ahead; a bad image stops the command if it shall."""
    for visit in visits(source, batches, workers=options.workers):
        if visit.bad and options.on_bad_image == "error":
            raise refusal(min(visit.bad.values()))
        yield visit


def good_indices(visit: Visit) -> np.ndarray:
    """Which images the rows of a visit's pixels are, int64 (n,)."""
    return np.array([index for index in visit.indices if index not in visit.bad], np.int64)
