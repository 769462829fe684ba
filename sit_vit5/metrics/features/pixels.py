"""Grey values as features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sit_vit5.metrics.features.base import POOL, check_outputs
from sit_vit5.utils.errors import UserError

MOST_PIXELS = 4096  # a covariance of 128 MB


class Pixels:
    """Grey values in [0, 1], flattened: for small images, where they mean something."""

    outputs = (POOL,)

    def __init__(self, weights: str | None = None, *, option: str = "--weights"):
        if weights is not None:
            raise UserError(f"{option} has no use with features pixels; drop it")
        self.identity = {"features": "pixels"}

    def __call__(
        self, images: np.ndarray, outputs: Sequence[str] = (POOL,)
    ) -> dict[str, np.ndarray]:
        check_outputs(outputs, self.outputs, "pixels")
        flat = images.reshape(len(images), -1)
        if flat.shape[1] > MOST_PIXELS:
            raise UserError(
                f"features pixels are for small images: {flat.shape[1]:,} numbers per image, at "
                f"most {MOST_PIXELS:,}; use the features inception"
            )
        return {POOL: flat / 255.0}
