"""2D rotary position embedding for patches and registers (ViT-5; Su et al., 2021).

In a head the first half of the channels turns with the row, the second with the column; pairs are
interleaved, (x0, x1), (x2, x3), and turn by position * theta^(-2i / (d/2)).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(grid: tuple[int, int], head_width: int, theta: float) -> Tensor:
    """Angles (N, d/2) in fp64, one per interleaved pair, of a grid of integer positions."""
    quarter = head_width // 4
    frequencies = theta ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    rows, columns = torch.meshgrid(
        *(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij"
    )
    return torch.cat([rows.reshape(-1, 1) * frequencies, columns.reshape(-1, 1) * frequencies], 1)


def rotary_table(
    grid: tuple[int, int],
    head_width: int,
    *,
    theta: float | None,
    registers: int,
    register_theta: float | None,
) -> Tensor | None:
    """cos and sin (2, N + registers, d/2) of the whole sequence in fp32; None if nothing turns.

    Tokens without a theta get angle 0, the identity.
    """
    if theta is None and register_theta is None:
        return None
    side = round(registers**0.5)
    parts = [
        torch.zeros(grid[0] * grid[1], head_width // 2, dtype=torch.float64)
        if theta is None
        else rotary_angles(grid, head_width, theta),
        torch.zeros(registers, head_width // 2, dtype=torch.float64)
        if register_theta is None
        else rotary_angles((side, side), head_width, register_theta),
    ]
    angles = torch.cat(parts)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turns the channel pairs of x (..., N, d) by the table (2, N, d/2), in fp32."""
    cos, sin = table
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # (..., N, d/2)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
