"""Images between seeds, and between classes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sit_vit5.models.denoiser import Denoiser
from sit_vit5.sampling.generator import Generator
from sit_vit5.sampling.grid import decimals, draw_grid, make_images
from sit_vit5.utils import rng


def slerp(first: Tensor, second: Tensor, weight: float) -> Tensor:
    """From first (weight 0) to second (1) on a great circle, the norm going in a straight line.

    Shoemake (1985). A straight line would pass through points far too short to be noise. Opposite
    directions meet by some circle, always the same.
    """
    if weight in (0, 1):
        return second if weight else first  # to the bit
    a, b = first.double().flatten(), second.double().flatten()
    norms = a.norm(), b.norm()
    a, b = a / norms[0], b / norms[1]
    across = b - (a @ b) * a
    angle = torch.atan2(across.norm(), a @ b)
    if across.norm() < 1e-9:  # no circle is given: through the axis most across
        axis = torch.zeros_like(a)
        axis[a.abs().argmin()] = 1
        across = axis - (a @ axis) * a
    across = across / across.norm()
    direction = torch.cos(weight * angle) * a + torch.sin(weight * angle) * across
    return (torch.lerp(*norms, weight) * direction).reshape(first.shape).to(first.dtype)


@dataclass(frozen=True)
class BetweenSeeds(Generator):
    """Image i starts at position i modulo `positions`: from seed to seed, frames - 1 each.

    Every noise is interpolated, an SDE's too; at a seed it is that of the seed's image 0.
    """

    seeds: tuple[int, ...] = (0, 1)
    frames: int = 2

    @property
    def positions(self) -> int:
        return (len(self.seeds) - 1) * (self.frames - 1) + 1

    def place(self, position: int) -> tuple[int, float]:
        """The seed before the position, by number, and the way from it to the next, in [0, 1)."""
        number, frame = divmod(position, self.frames - 1)
        return number, frame / (self.frames - 1)

    def noise(self, purpose: str, indices: Sequence[int], *, step: int = 0) -> Tensor:
        shape = (self.model.in_channels, *self.model.input_size)
        ends = torch.stack([
            torch.from_numpy(rng.normal(seed, purpose, shape, step=step, indices=[0])[0])
            for seed in self.seeds
        ])  # fmt: skip
        places = [self.place(index % self.positions) for index in indices]
        return torch.stack([
            slerp(ends[number], ends[min(number + 1, len(ends) - 1)], weight)
            for number, weight in places
        ])  # fmt: skip


def between_classes(model: Denoiser, pairs: Sequence[tuple[int, int]], count: int) -> Denoiser:
    """The network with `count` classes per pair, whose embeddings lie on a straight line from the
    pair's first to its second. All other weights are shared, the null label's too.
    """
    table = model.conditioning.labels.weight
    weights = torch.linspace(0, 1, count, device=table.device)
    lines = [torch.lerp(table[a], table[b], weights[:, None]) for a, b in pairs]
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    mixed = copy.deepcopy(model, memo=shared)
    rows = torch.cat([*lines, table[model.null_label][None]])
    mixed.conditioning.labels = nn.Embedding.from_pretrained(rows)
    mixed.num_classes = len(rows) - 1
    return mixed


def interpolate(
    generator: Generator,
    labels: Sequence[int],
    *,
    to_label: int | None = None,
    seeds: tuple[int, ...],
    frames: int,
    batch_size: int,
    progress: bool = False,
) -> np.ndarray:
    """uint8 (rows, positions, H, W, C): a row per label, from seed to seed.

    to_label: the class at the last position, reached by way of the class embedding.
    """
    between = BetweenSeeds(
        generator.model, generator.codec, generator.flow, generator.settings, generator.reference,
        seeds, frames,
    )  # fmt: skip
    count = between.positions
    every = [label for label in labels for _ in range(count)]
    if to_label is not None:
        pairs = [(label, to_label) for label in labels]
        models = [
            None if model is None else between_classes(model, pairs, count)
            for model in (between.model, between.reference)
        ]
        between = replace(between, model=models[0], reference=models[1])
        every = list(range(len(every)))
    images = make_images({"": between}, every, batch_size=batch_size, progress=progress)[""]
    return images.reshape(len(labels), count, *images.shape[1:])


def position_names(seeds: Sequence[int], frames: int) -> list[str]:
    """`seed 0`, 0.25, 0.5, 0.75, `seed 1`, ..."""
    between = decimals([frame / (frames - 1) for frame in range(1, frames - 1)])
    legs = [[*between, f"seed {seed}"] for seed in seeds[1:]]
    return [f"seed {seeds[0]}", *chain.from_iterable(legs)]


def draw_interpolation_strip(
    images: np.ndarray, names: Sequence[str], positions: Sequence[str], title: str
) -> Image.Image:
    """A row per name, a column per position. images: (rows, positions, H, W, C)."""
    tiles = images.reshape(-1, *images.shape[2:])
    return draw_grid({title: tiles}, names, len(positions), headings=positions)


def draw_interpolation_frames(
    images: np.ndarray, names: Sequence[str], positions: Sequence[str], title: str
) -> list[Image.Image]:
    """A picture per position, with all rows side by side under their names."""
    return [
        draw_grid({f"{position}   {title}": images[:, place]}, [""], len(names), headings=names)
        for place, position in enumerate(positions)
    ]
