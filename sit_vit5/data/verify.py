"""Whether a latent cache still holds what was written: hashes and finite values."""

from __future__ import annotations

import hashlib

import numpy as np
from tqdm import tqdm

from sit_vit5.data.latent_cache import LatentCache, Shard
from sit_vit5.progress import progress_bar

_AT_ONCE = 1 << 24  # bytes


def verify(cache: LatentCache, *, shown: bool = True) -> list[str]:
    """What is wrong, one line each with the file's name; empty if nothing is."""
    problems = []
    size = sum((cache.root / shard.file).stat().st_size for shard in cache.shards)
    with progress_bar(size, unit="B", title="verify", shown=shown) as bar:
        bar.unit_scale = True
        for shard in cache.shards:
            digest, bad = _read(cache, shard, bar)
            path = cache.root / shard.file
            if digest != shard.sha256:
                problems.append(
                    f"{path} was changed: its SHA-256 is {digest[:12]}..., the index says "
                    f"{shard.sha256[:12]}...; remove it and index.json, and encode again"
                )
            if bad:
                problems.append(f"{path} holds {bad} values that are not finite; encode again")
    return problems


def _read(cache: LatentCache, shard: Shard, bar: tqdm) -> tuple[str, int]:
    """SHA-256 of a shard and how many of its values are not finite."""
    digest, bad = hashlib.sha256(), 0
    with (cache.root / shard.file).open("rb") as file:
        while piece := file.read(_AT_ONCE):
            digest.update(piece)
            bad += int(np.count_nonzero(~np.isfinite(np.frombuffer(piece, cache.dtype))))
            bar.update(len(piece))
    return digest.hexdigest(), bad
