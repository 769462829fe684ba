"""A pass of an extractor over images: features in image order, or their statistics alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from sit_vit5.errors import UserError
from sit_vit5.memory import memory_errors
from sit_vit5.metrics.extractors import POOL, Extractor
from sit_vit5.metrics.statistics import Moments, Statistics
from sit_vit5.progress import progress_bar


def extract_statistics(
    extractor: Extractor,
    batches: Iterable[np.ndarray],
    *,
    title: str,
    total: int,
    outputs: Sequence[str] = (POOL,),
    shown: bool = True,
) -> dict[str, Statistics]:
    """Statistics of each output over all batches of uint8 images, in bounded memory.

    title: what error messages and the progress bar call the images. Refuses an empty set.
    """
    moments = {output: Moments() for output in outputs}
    for found in feature_batches(
        extractor, batches, title=title, total=total, outputs=outputs, shown=shown
    ):
        for output, rows in found.items():
            moments[output].add(rows)
    return {output: found.statistics() for output, found in moments.items()}


def extract_features(
    extractor: Extractor,
    batches: Iterable[np.ndarray],
    *,
    title: str,
    total: int,
    outputs: Sequence[str] = (POOL,),
    shown: bool = True,
) -> dict[str, np.ndarray]:
    """Features (N, D) of each output in the order of the images. Refuses an empty set."""
    parts = list(
        feature_batches(extractor, batches, title=title, total=total, outputs=outputs, shown=shown)
    )
    return {output: np.concatenate([part[output] for part in parts]) for output in outputs}


def feature_batches(
    extractor: Extractor,
    batches: Iterable[np.ndarray],
    *,
    title: str,
    total: int,
    outputs: Sequence[str] = (POOL,),
    shown: bool = True,
) -> Iterator[dict[str, np.ndarray]]:
    """Each output of each batch. Refuses an empty set and features that are not finite."""
    empty = True
    with (
        progress_bar(total, unit="image", title=title, shown=shown) as bar,
        memory_errors("lower --batch-size"),
    ):
        for images in batches:
            found = extractor(images, outputs)
            if not all(np.isfinite(rows).all() for rows in found.values()):
                raise UserError(f"{title}: non-finite features; check the extractor")
            empty = False
            yield found
            bar.update(len(images))
    if empty:
        raise UserError(f"{title}: no images")
