"""What the library's functions take: NumPy or torch, whole or in batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from sit_vit5.errors import UserError

# Features (N, D) of N images: one array, or an iterable of batches of them.
Array = np.ndarray | torch.Tensor
Features = Array | Iterable[Array]


def to_numpy(array: Array) -> np.ndarray:
    """A NumPy view or copy; bf16 and fp16 as fp32, since NumPy lacks the first."""
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu()
        if array.is_floating_point():
            array = array.to(torch.promote_types(array.dtype, torch.float32))
        return array.numpy()
    return np.asarray(array)


def batches_of(features: Features, what: str) -> Iterator[np.ndarray]:
    """Batches (B, D) of finite numbers, of which there is at least one."""
    whole = isinstance(features, np.ndarray | torch.Tensor)
    count = 0
    for batch in [features] if whole else features:
        rows = to_numpy(batch)
        if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.number):
            raise UserError(
                f"{what}: expected features (N, D), found {rows.dtype} {rows.shape}; flatten "
                "images, or pass them through an extractor"
            )
        if not np.isfinite(rows).all():
            raise UserError(f"{what}: features are not finite; check the images and the extractor")
        count += len(rows)
        yield rows if whole else rows.copy()  # a generator may fill one buffer again and again
    if not count:
        raise UserError(f"{what}: no features")


def rows_of(features: Features, what: str) -> np.ndarray:
    """All rows (N, D) in one array."""
    batches = list(batches_of(features, what))
    return batches[0] if len(batches) == 1 else np.concatenate(batches)


def check_widths(samples: int, reference: int) -> None:
    """Refuses features of different extractors."""
    if samples != reference:
        raise UserError(
            f"samples have {samples} features, the reference {reference}; it was made with another "
            "extractor"
        )
