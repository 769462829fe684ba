"""The built-in digits: 1,797 real 8x8 scans (UCI optdigits) in scikit-learn's wheel."""

from __future__ import annotations

import hashlib

import numpy as np

from sit_vit5 import rng
from sit_vit5.data.image_source import ArrayImages
from sit_vit5.errors import UserError

HELD_OUT = 360  # a fifth


class Digits(ArrayImages):
    """One of two fixed parts, drawn at random once: `train` (1,437), `held-out` (360)."""

    def __init__(self, split: str, *, image_size: int = 8, unconditional: bool = False):
        if image_size != 8:
            raise UserError(f"data.image_size {image_size} does not fit digits; use 8")
        if split not in ("train", "held-out"):
            raise UserError(f"digits has no split {split!r}; use train or held-out")
        # Imported here: scikit-learn takes a second.
        from sklearn.datasets import load_digits

        scans = load_digits()
        order = rng.generator(0, "digits split").permutation(len(scans.target))
        chosen = order[HELD_OUT:] if split == "train" else order[:HELD_OUT]
        grey = np.rint(scans.images[chosen] * (255 / 16)).astype(np.uint8)  # 17 levels, 0..16
        labels = scans.target[chosen]
        super().__init__(
            f"digits:{split}",
            grey[..., None],
            where=f"digits:{split}",
            labels=None if unconditional else labels,
            class_names=() if unconditional else tuple(str(digit) for digit in range(10)),
            image_size=image_size,
            digest=hashlib.sha256(grey.tobytes() + labels.tobytes()).hexdigest(),
        )
