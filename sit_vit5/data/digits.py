"""The built-in digits: 1,797 real 8x8 scans (UCI optdigits) in scikit-learn's wheel."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

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
        scans, targets = read_scans()
        order = rng.generator(0, "digits split").permutation(len(targets))
        chosen = order[HELD_OUT:] if split == "train" else order[:HELD_OUT]
        grey = np.rint(scans[chosen] * (255 / 16)).astype(np.uint8)  # 17 levels, 0..16
        labels = targets[chosen]
        super().__init__(
            f"digits:{split}",
            grey[..., None],
            where=f"digits:{split}",
            labels=None if unconditional else labels,
            class_names=() if unconditional else tuple(str(digit) for digit in range(10)),
            image_size=image_size,
            digest=hashlib.sha256(grey.tobytes() + labels.tobytes()).hexdigest(),
        )


def read_scans() -> tuple[np.ndarray, np.ndarray]:
    """Levels 0 to 16, fp64 (1797, 8, 8), and digits, int64 (1797,), as `load_digits` gives them.

    Read from scikit-learn's file where it lies where it always did: importing the library takes a
    second, at every start of every command.
    """
    file = Path(*find_spec("sklearn").submodule_search_locations, "datasets/data/digits.csv.gz")
    if file.is_file():
        table = np.loadtxt(file, delimiter=",")
        return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    scans = load_digits()
    return scans.images, scans.target
