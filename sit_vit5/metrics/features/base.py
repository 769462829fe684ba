"""What every extractor is, and what those with a network share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from sit_vit5.utils.errors import UserError

# Outputs: one vector per image for distances; ADM's spatial features for sFID; logits for the
# Inception Score.
POOL, SPATIAL, LOGITS = "pool", "spatial", "logits"


class Extractor(Protocol):
    """uint8 (B, H, W, 1 or 3) to fp32 or fp64 (B, D) for each of the wanted outputs.

    identity: JSON values that tell what a result depends on; outputs: what it can give.
    """

    identity: dict
    outputs: tuple[str, ...]

    def __call__(
        self, images: np.ndarray, outputs: Sequence[str] = (POOL,)
    ) -> dict[str, np.ndarray]: ...


def image_tensor(images: np.ndarray, device: torch.device) -> torch.Tensor:
    """uint8 (B, H, W, 1 or 3) as uint8 (B, 3, H, W) on a device; grey is repeated."""
    rgb = np.broadcast_to(images, (*images.shape[:3], 3))
    # A memory map or a broadcast is not writable, which torch does not like: a copy.
    rgb = rgb if rgb.flags.writeable and rgb.flags.c_contiguous else rgb.copy()
    return torch.from_numpy(rgb).to(device).permute(0, 3, 1, 2)


def check_outputs(asked: Sequence[str], given: tuple[str, ...], name: str) -> None:
    """Refuses outputs that an extractor does not have."""
    for output in asked:
        if output not in given:
            raise UserError(f"features {name} give {', '.join(given)}, not {output}")
