"""2D rotary position embedding for patches and registers (ViT-5; Su et al., 2021).

In a head the first half of the channels turns with the row, the second with the column; pairs are
interleaved, (x0, x1), (x2, x3), and turn by position * theta^(-2i / (d/2)).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sit_vit5.config.presets import Backbone
from sit_vit5.utils.precision import at_least_fp32


def rotary_angles(
    grid: tuple[int, int],
    head_width: int,
    theta: float,
    *,
    extent: tuple[float, float] | None = None,
    centred: bool = False,
) -> Tensor:
    """Angles (N, d/2) in fp64, one per interleaved pair, of a grid's positions.

    Positions are integers, or such that (rows, columns) span the extent: of the grid the model was
    trained at, or an angle that the recipe names. centred: the middle of the grid is at 0.
    """
    quarter = head_width // 4
    frequencies = theta ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    rows, columns = torch.meshgrid(
        *(
            (torch.arange(side, dtype=torch.float64) - (side - 1) / 2 * centred) * (whole / side)
            for side, whole in zip(grid, extent or grid, strict=True)
        ),
        indexing="ij",
    )
    return torch.cat([rows.reshape(-1, 1) * frequencies, columns.reshape(-1, 1) * frequencies], 1)


def rotary_table(
    grid: tuple[int, int],
    head_width: int,
    *,
    theta: float | None,
    registers: int,
    register_theta: float | None,
    unrotated: int = 0,
    extent: tuple[float, float] | None = None,
    centred: bool = False,
) -> Tensor | None:
    """(unrotated + N + registers, d/2, [cos, sin]) of the whole sequence in fp32, or None.

    The first `unrotated` tokens (cls) and tokens without a theta get angle 0, the identity; None
    where nothing turns.
    """
    if theta is None and register_theta is None:
        return None
    side, half = round(registers**0.5), head_width // 2
    still = torch.zeros(unrotated + grid[0] * grid[1] + registers, half, dtype=torch.float64)
    cls, patches, own = still.split([unrotated, grid[0] * grid[1], registers])
    if theta is not None:
        patches = rotary_angles(grid, head_width, theta, extent=extent, centred=centred)
    if register_theta is not None:
        own = rotary_angles((side, side), head_width, register_theta)
    angles = torch.cat([cls, patches, own])
    return torch.stack([angles.cos(), angles.sin()], dim=-1).float()


class RopeTables:
    """The rotary tables of a backbone, each built once per grid and device.

    A plain object, not a buffer: rebuilt from the configuration, so that loading by any route
    (meta device, safetensors) cannot leave it uninitialised.
    """

    def __init__(
        self, backbone: Backbone, *, unrotated: int = 0, trained: tuple[int, int] | None = None
    ):
        self.backbone, self.unrotated, self.trained = backbone, unrotated, trained
        self._tables: dict[tuple, Tensor | None] = {}

    def __call__(self, grid: tuple[int, int], device: torch.device) -> Tensor | None:
        """(N, d/2, 2) of the whole sequence; None if nothing turns."""
        key = (grid, device)
        if key not in self._tables:
            recipe = self.backbone.recipe
            extent = (recipe.rope_extent,) * 2 if recipe.rope_extent else self.trained
            # A table made while sampling must serve training later.
            with torch.inference_mode(False):
                table = rotary_table(
                    grid,
                    self.backbone.width // self.backbone.heads,
                    theta=recipe.rope_theta,
                    registers=recipe.registers,
                    register_theta=recipe.register_theta,
                    unrotated=self.unrotated,
                    extent=extent,
                    centred=recipe.rope_extent is not None,
                )
                self._tables[key] = None if table is None else table.to(device)
        return self._tables[key]


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turns the channel pairs of x (..., N, d) by the table (N, d/2, 2), in fp32 or fp64."""
    x = at_least_fp32(x)
    if torch.compiler.is_compiling():  # the compiler fuses real numbers only
        (even, odd), (cos, sin) = x.unflatten(-1, (-1, 2)).unbind(-1), table.unbind(-1)
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    else:  # the same in one pass instead of six
        turned = torch.view_as_real(as_complex(x) * torch.view_as_complex(table))
    return turned.flatten(-2)


def as_complex(x: Tensor) -> Tensor:
    """The channel pairs of x (..., d) as complex numbers (..., d/2), a view."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))
