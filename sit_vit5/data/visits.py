"""Going once through images in a given order, decoded ahead by worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from sit_vit5.data import Source
from sit_vit5.data.fingerprints import RECORD, fingerprint
from sit_vit5.data.images import BadImage
from sit_vit5.data.workers import read_ahead


@dataclass
class Visit:
    """One batch. pixels: uint8 (n, H, W, C) of those of `indices` that can be decoded; bad: why
    the others cannot, by index. records: fingerprints of the former, (n,), if they are wanted."""

    indices: Sequence[int]
    pixels: np.ndarray
    records: np.ndarray
    bad: dict[int, str] = field(default_factory=dict)


def visits(
    source: Source,
    batches: Sequence[Sequence[int]],
    *,
    workers: int,
    fingerprints: bool = False,
) -> Iterator[Visit]:
    """The batches of indices one after the other."""
    items = _Visits(source, batches, fingerprints=fingerprints)
    return read_ahead(items, range(len(batches)), workers=workers)


class _Visits:
    def __init__(self, source: Source, batches: Sequence[Sequence[int]], *, fingerprints: bool):
        self.source, self.batches, self.fingerprints = source, batches, fingerprints

    def __getitem__(self, number: int) -> Visit:
        visit = Visit(self.batches[number], np.empty((0,), np.uint8), np.empty((0,), RECORD))
        pixels, records = [], []
        for index in visit.indices:
            try:
                pixels.append(self.source.load(index)[0])
                if self.fingerprints:
                    records.append(fingerprint(self.source, index))
            except BadImage as error:
                visit.bad[index] = str(error)
        if pixels:
            visit.pixels = np.stack(pixels)
        if records:
            visit.records = np.stack(records)
        return visit
