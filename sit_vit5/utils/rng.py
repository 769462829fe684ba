"""Random numbers as functions of (seed, purpose, step, index), never of hidden state.

The generator is numpy's counter-based Philox: the key comes from (seed, purpose), and the upper
half of the 256-bit counter holds step and index. So any number can be drawn again alone, by any
process, in any order, on any device; and no two images can share a stream, which seeding torch's
CPU generator cannot promise (it keeps 32 bits of the seed).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np


def generator(seed: int, purpose: str, step: int = 0, index: int = 0) -> np.random.Generator:
    """A fresh generator for one purpose, step and index (both below 2**64)."""
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, index, step]))


def normal(
    seed: int, purpose: str, shape: tuple[int, ...], *, step: int = 0, indices: Iterable[int]
) -> np.ndarray:
    """Standard normal float32 numbers (len(indices), *shape), one stream per index."""
    rows = [
        generator(seed, purpose, step, index).standard_normal(shape, dtype=np.float32)
        for index in indices
    ]
    return np.stack(rows) if rows else np.zeros((0, *shape), np.float32)


def uniform(seed: int, purpose: str, count: int, *, step: int = 0) -> np.ndarray:
    """The `count` float32 numbers in [0, 1) that belong to a whole step."""
    return generator(seed, purpose, step).random(count, dtype=np.float32)
