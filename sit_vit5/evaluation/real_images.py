"""Real data sets for evaluation, through the loader and the crop of training (row E21)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sit_vit5.config import DataConfig, RealImagesConfig
from sit_vit5.data import Source, build_source
from sit_vit5.data.images import refusal
from sit_vit5.data.visits import Visit, visits
from sit_vit5.errors import UserError
from sit_vit5.evaluation.inputs import BUILT_IN
from sit_vit5.metrics.extractors import Extractor, build_extractor


def loader_options(options: RealImagesConfig, path: str) -> DataConfig:
    """What training's loader is told: of a path, or of a built-in set such as digits:held-out."""
    built_in = path in BUILT_IN
    if built_in and (options.source or options.split):
        raise UserError(f"{path} is built in; drop --source and --split")
    return DataConfig(
        source="digits" if built_in else options.source,
        path=None if built_in else path,
        split=BUILT_IN[path] if built_in else options.split or DataConfig.split,
        image_column=options.image_column,
        label_column=options.label_column,
        image_size=options.image_size,
        unconditional=options.unconditional,
        horizontal_flip=False,
        on_bad_image=options.on_bad_image,
        workers=options.workers,
    )


def open_source(options: RealImagesConfig, path: str, *, prefix: str = "--") -> Source:
    """The images of a data set; a latent cache has none. prefix: of the options' names."""
    try:
        source = build_source(loader_options(options, path))
    except UserError as error:  # it names the options as train_sit.py calls them
        text = str(error).replace("--data.path ", "").replace("--data.", prefix)
        raise UserError(text) from None
    if source.kind != "images":
        raise UserError(f"{path} is a latent cache; give the images that it was made from")
    return source


def open_extractor(options: RealImagesConfig) -> Extractor:
    """What gives the images' features."""
    return build_extractor(options.features, options.weights or options.inception_weights)


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
