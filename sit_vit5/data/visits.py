"""Going once through images in a given order, decoded ahead by worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from sit_vit5.data import Source
from sit_vit5.data.images import BadImage
from sit_vit5.data.workers import read_ahead


@dataclass
class Visit:
    """One batch. pixels: uint8 (n, H, W, C) of those of `indices` that can be decoded; bad: why
    the others cannot, by index."""

    indices: Sequence[int]
    pixels: np.ndarray
    bad: dict[int, str] = field(default_factory=dict)


def visits(source: Source, batches: Sequence[Sequence[int]], *, workers: int) -> Iterator[Visit]:
    """The batches of indices one after the other."""
    return read_ahead(_Visits(source, batches), range(len(batches)), workers=workers)


class _Visits:
    def __init__(self, source: Source, batches: Sequence[Sequence[int]]):
        self.source, self.batches = source, batches

    def __getitem__(self, number: int) -> Visit:
        visit = Visit(self.batches[number], np.empty((0,), np.uint8))
        pixels = []
        for index in visit.indices:
            try:
                pixels.append(self.source.load(index)[0])
            except BadImage as error:
                visit.bad[index] = str(error)
        if pixels:
            visit.pixels = np.stack(pixels)
        return visit
