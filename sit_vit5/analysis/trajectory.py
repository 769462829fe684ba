"""The denoising path: what a solver sees on its way from noise to images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sit_vit5.sampling.generator import Generator
from sit_vit5.sampling.grid import decimals, draw_grid
from sit_vit5.utils.errors import UserError

DEFAULT_FRAMES = 10


@dataclass(frozen=True)
class TrajectoryState:
    """x_t and the data expected from it, decoded: uint8 (B, H, W, C)."""

    t: float
    x_t: np.ndarray
    data: np.ndarray


@torch.inference_mode()
def denoising_path(
    generator: Generator, indices: Sequence[int], labels: Sequence[int], *, frames: int | None
) -> list[TrajectoryState]:
    """`frames` states of the solver, evenly by its steps, from the noise to the images; None: ten,
    or all of fewer.

    The expected data cost an evaluation each. The last moment is the image, and so is its data.
    """
    steps, wanted = generator.settings.steps, None
    if steps is not None:  # an adaptive method's are known afterwards
        wanted = _evenly(frames, steps + 1, "more steps")
    device = next(generator.model.parameters()).device
    field, _ = generator.field(torch.tensor(labels, device=device))
    numbers, seen = count(), {}

    def observe(x_t: Tensor, t: float) -> None:
        number = next(numbers)
        if wanted is None or number in wanted:
            seen[number] = (t, x_t)

    noise = generator.noise("sample", indices).to(device)
    generator.solve(field, noise, indices, observe=observe)
    wanted = wanted or _evenly(frames, len(seen), "smaller tolerances")
    *chosen, (end, latents) = (seen[number] for number in wanted)
    path = [
        TrajectoryState(t, *(generator.pixels(x).numpy() for x in (x_t, field.data(x_t, t))))
        for t, x_t in chosen
    ]
    images = generator.pixels(latents).numpy()
    return [*path, TrajectoryState(end, images, images)]


def _evenly(frames: int | None, states: int, remedy: str) -> list[int]:
    """Numbers of the states to show."""
    if frames is None:
        frames = min(DEFAULT_FRAMES, states)
    elif frames > states:
        raise UserError(
            f"frames {frames} must be at most {states}, the noise and one per step; or use {remedy}"
        )
    return [round(number) for number in np.linspace(0, states - 1, frames)]


def draw_path_strip(
    path: Sequence[TrajectoryState], names: Sequence[str], title: str
) -> Image.Image:
    """A column per moment, under its t; two lines per image, x_t and the expected data."""
    firsts = [f"x_t of {name}" if name else "x_t" for name in names]
    lines = [line for first in firsts for line in (first, "expected data")]
    tiles = np.stack([np.stack([moment.x_t, moment.data], 1) for moment in path], 2)
    tiles = tiles.reshape(-1, *tiles.shape[3:])  # (B, 2, T, H, W, C) -> (B 2 T, H, W, C)
    headings = [f"t = {text}" for text in decimals([moment.t for moment in path])]
    return draw_grid({title: tiles}, lines, len(path), headings=headings, lines=2)


def draw_path_frames(
    path: Sequence[TrajectoryState], names: Sequence[str], title: str
) -> list[Image.Image]:
    """A picture per moment: a row per name, for each of its images x_t and the expected data."""
    frames = []
    for moment, t in zip(path, decimals([moment.t for moment in path]), strict=True):
        tiles = np.stack([moment.x_t, moment.data], 1).reshape(-1, *moment.x_t.shape[1:])
        columns = len(tiles) // len(names)
        headings = ["x_t", "expected"] * (columns // 2)
        caption = f"t = {t}    {title}"
        frames.append(draw_grid({caption: tiles}, names, columns, headings=headings))
    return frames
