"""One pass of an extractor over a set of images, shared among processes and kept for the next."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from sit_vit5.distributed import Processes, alone, gather, one_word
from sit_vit5.evaluation.feature_cache import FeatureCache
from sit_vit5.evaluation.image_files import FileSet
from sit_vit5.evaluation.observing import SEEN, Observing
from sit_vit5.metrics.accumulator import describe, merge_statistics
from sit_vit5.metrics.features import extract_features, extract_statistics, feature_batches
from sit_vit5.metrics.image_sets import ImageSet
from sit_vit5.metrics.metric import Described
from sit_vit5.metrics.statistics import Statistics
from sit_vit5.streams import warn

# Above it only statistics are kept: features of more images would fill the memory.
MOST_ROWS = 100_000


@dataclass(frozen=True)
class Pass:
    """How features are had, whatever the images.

    cache: None keeps nothing; batch_size: images per call of the extractor. Batches lie at its
    multiples whatever the number of processes, which therefore changes no bit; the batch size
    itself changes a network's features in their last bits.
    """

    extractor: Observing
    batch_size: int
    cache: FeatureCache | None = None
    processes: Processes = field(default_factory=alone)

    def describe(
        self,
        images: ImageSet,
        *,
        rows: Sequence[str],
        statistics: Sequence[str],
        identity: str | None,
        title: str,
    ) -> Described:
        """Rows and statistics of these outputs, and the rows `SEEN`; on the main process alone.

        identity: what tells these images from others in the cache, None to keep nothing.
        """
        outputs = tuple(dict.fromkeys([*rows, *statistics]))
        if images.count > MOST_ROWS:
            return Described(statistics=self._statistics(images, outputs, title))
        features = self._features(images, (*outputs, SEEN), identity, title)
        return describe(features, statistics) if self.processes.is_main else Described()

    def stream(
        self, images: ImageSet, outputs: Sequence[str], title: str
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """This process's share batch by batch, each with the number of its first image."""
        share = self._share(images.count)
        if share:
            batches = feature_batches(
                self.extractor, self._batches(images, share), **self._how(outputs, title, share)
            )
            yield from zip(share[:: self.batch_size], batches, strict=True)

    def _features(
        self, images: ImageSet, outputs: Sequence[str], identity: str | None, title: str
    ) -> dict[str, np.ndarray]:
        """All rows on the main process, in the images' order; nothing on the others."""
        cache = self.cache if identity is not None else None
        found, extractor = {}, self.extractor.identity
        with one_word(self.processes):
            if cache and self.processes.is_main:
                found = cache.find(identity, extractor, outputs, images.count)
            (kept,) = gather([tuple(found)], self.processes)[:1]
        missing = [output for output in outputs if output not in kept]
        if missing:
            made = self._extract(images, missing, title)
            if cache and self.processes.is_main:
                try:
                    cache.keep(identity, extractor, made)
                except OSError as error:  # a full disk must not cost the hours of the pass
                    warn(f"features of {title} are not kept: {error}")
            found |= made
        return found

    def _extract(
        self, images: ImageSet, outputs: Sequence[str], title: str
    ) -> dict[str, np.ndarray]:
        share, own = self._share(images.count), {}
        with one_word(self.processes):
            if share:
                own = extract_features(
                    self.extractor, self._batches(images, share), **self._how(outputs, title, share)
                )
        parts = gather([(share.start, own)], self.processes)
        if not self.processes.is_main:
            return {}
        parts = [part for _, part in sorted(parts, key=lambda part: part[0]) if part]
        features = {
            output: parts[0][output]
            if len(parts) == 1
            else np.concatenate([part[output] for part in parts])
            for output in outputs
        }
        # Each image once: neither padding nor a repeat can have come in (E29).
        assert all(len(found) == images.count for found in features.values())
        return features

    def _statistics(
        self, images: ImageSet, outputs: Sequence[str], title: str
    ) -> dict[str, Statistics]:
        share, own = self._share(images.count), {}
        with one_word(self.processes):
            if share:
                own = extract_statistics(
                    self.extractor, self._batches(images, share), **self._how(outputs, title, share)
                )
        parts = [part for part in gather([own], self.processes) if part]
        return {output: merge_statistics([part[output] for part in parts]) for output in outputs}

    def _share(self, count: int) -> range:
        """This process's images: whole batches, one contiguous run."""
        batches = -(-count // self.batch_size)
        cuts = [
            min(batches * rank // self.processes.count * self.batch_size, count)
            for rank in (self.processes.rank, self.processes.rank + 1)
        ]
        return range(*cuts)

    def _batches(self, images: ImageSet, share: range) -> Iterator[np.ndarray]:
        return read_ahead(images.batches(self.batch_size, share.start, share.stop))

    def _how(self, outputs: Sequence[str], title: str, share: range) -> dict:
        shown = self.processes.is_main
        return {"title": title, "total": len(share), "outputs": outputs, "shown": shown}


def read_ahead(batches: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """The same batches; a thread decodes the next one while this one is worked on."""
    with ThreadPoolExecutor(1) as reader:
        following = reader.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = reader.submit(next, batches, None)
            yield batch


def identity_of(images: ImageSet, sha256: str | None) -> str | None:
    """What a cache knows images by: their file's hash, or that of names, sizes and times of files.

    The time of the last change of an inode counts too, which no copying command sets back.
    """
    if sha256 is not None:
        return sha256
    if not isinstance(images, FileSet):
        return None
    digest = hashlib.sha256()
    for file in images.files:
        facts = file.stat()
        numbers = (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)
        digest.update(os.fsencode(file.resolve()) + f"\0{numbers}\n".encode())
    return f"files {digest.hexdigest()}"
