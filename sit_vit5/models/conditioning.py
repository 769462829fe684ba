"""Time and class to the vector that modulates every block (adaLN; Peebles and Xie, 2023).

All of it runs in fp32, also under autocast: it is a few rows per image, and a bf16 time of 0.999
is 1.0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sit_vit5.models.linear import Linear
from sit_vit5.precision import no_autocast

FREQUENCIES = 256


def timestep_embedding(t: Tensor, width: int, max_period: float = 10000.0) -> Tensor:
    """[cos, sin] of t * max_period^(-i / (width // 2)), (B,) -> (B, width); odd widths end in 0."""
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float32, device=t.device) / half
    angles = t.float()[:, None] * torch.exp(-math.log(max_period) * exponents)
    embedding = torch.cat([angles.cos(), angles.sin()], dim=1)
    return torch.nn.functional.pad(embedding, (0, width % 2))


class Conditioning(nn.Module):
    """SiLU(MLP(time features) + class embedding): the input of every modulation, (B, D)."""

    def __init__(self, width: int, num_classes: int):
        super().__init__()
        self.time_in = Linear(FREQUENCIES, width)
        self.time_out = Linear(width, width)
        # One more row than classes: the null label, learned through class dropout.
        self.labels = nn.Embedding(num_classes + 1, width) if num_classes else None

    def forward(self, t: Tensor, labels: Tensor | None) -> Tensor:
        """t: (B,) in [0, 1]; labels: (B,), not read by an unconditional model."""
        with no_autocast(t.device):
            hidden = nn.functional.silu(self.time_in(timestep_embedding(t, FREQUENCIES)))
            c = self.time_out(hidden)
            if self.labels is not None:
                c = c + self.labels(labels)
            return nn.functional.silu(c)


class Modulation(nn.Module):
    """A zero-initialised linear map of the conditioning to `count` vectors, each (B, 1, D)."""

    def __init__(self, width: int, count: int):
        super().__init__()
        self.count = count
        self.linear = Linear(width, count * width)

    def forward(self, c: Tensor) -> tuple[Tensor, ...]:
        with no_autocast(c.device):
            return self.linear(c)[:, None].chunk(self.count, dim=-1)


def modulate(x: Tensor, shift: Tensor | None, scale: Tensor | None) -> Tensor:
    """x * (1 + scale) + shift in one pass, or x. x: (B, N, D); shift, scale: (B, 1, D) or None."""
    return x if scale is None else torch.addcmul(shift, x, 1 + scale)
