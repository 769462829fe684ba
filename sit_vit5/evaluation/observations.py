"""Digests and single colours of images, computed in the same pass as their features.

They are one more output of the extractor, so that they are gathered, ordered and cached as features
are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from sit_vit5.metrics.features import POOL, Extractor
from sit_vit5.metrics.image_sets import equal_channels, with_channels

STRIDE = 997  # prime, so that the first pixels compared are in all columns
SEEN = "seen"  # the output: uint8 (B, 9), eight bytes of a digest, and 1 for a single colour


class Observing:
    """Extractor with the additional output `SEEN`.

    channels: of the images that the extractor gets, 1 or 3, whatever a set of grey images has, so
    that equal images give equal features; None: as they come.
    """

    def __init__(self, extractor: Extractor, channels: int | None = None):
        self.extractor, self.channels = extractor, channels
        self.identity, self.outputs = extractor.identity, extractor.outputs
        self._thread = ThreadPoolExecutor(1)

    def __call__(
        self, images: np.ndarray, outputs: Sequence[str] = (POOL,)
    ) -> dict[str, np.ndarray]:
        images = with_channels(images, self.channels or images.shape[-1], name="images")
        features = [output for output in outputs if output != SEEN]
        # In a thread: hashing releases the GIL, and a GPU leaves the CPU idle.
        seen = self._thread.submit(observe, images) if SEEN in outputs else None
        found = self.extractor(images, features) if features else {}
        return found if seen is None else {**found, SEEN: seen.result()}


@dataclass(frozen=True)
class Observations:
    """Digests and single colours of images, in order. digests: equal for equal pixels, uint64 (N,);
    plain: all pixels have one colour, bool (N,)."""

    digests: np.ndarray
    plain: np.ndarray

    @classmethod
    def of(cls, rows: Mapping[str, np.ndarray]) -> Observations | None:
        """Return the observations of a pass from its features; None without `SEEN`."""
        if SEEN not in rows:
            return None
        seen = np.ascontiguousarray(rows[SEEN])
        return cls(np.ascontiguousarray(seen[:, :8]).view(np.uint64)[:, 0], seen[:, 8] > 0)


def observe(images: np.ndarray) -> np.ndarray:
    """uint8 (B, H, W, C) -> uint8 (B, 9), see `SEEN`; a grey image counts by one channel."""
    images = np.ascontiguousarray(images)
    # SHA-256, which CPUs have instructions for: half the time of BLAKE2.
    digests = b"".join(hashlib.sha256(_one_channel(image)).digest()[:8] for image in images)
    return np.column_stack([np.frombuffer(digests, np.uint8).reshape(-1, 8), _plain(images)])


def _one_channel(image: np.ndarray) -> np.ndarray:
    """(H, W, C), or (H, W, 1) of a grey image; most in colour are told by a few of their pixels."""
    if image.shape[-1] == 1 or not equal_channels(image.reshape(-1, image.shape[-1])[::STRIDE]):
        return image
    return np.ascontiguousarray(image[..., :1]) if equal_channels(image) else image


def _plain(images: np.ndarray) -> np.ndarray:
    """Which images have a single colour, bool (B,); most are told by a few of their pixels."""
    pixels = images.reshape(len(images), -1, images.shape[-1])  # (B, H * W, C)
    found = (pixels[:, ::STRIDE] == pixels[:, :1]).all(axis=(1, 2))
    found[found] = (pixels[found] == pixels[found, :1]).all(axis=(1, 2))
    return found
