"""Labelled grids: one row per class, one block per set of weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sit_vit5.progress import progress_bar
from sit_vit5.sampling.generator import Generator

GAP = 4
TILE = 64  # smallest side of a shown image in pixels; small images are enlarged without blurring
FONT_SIZE = 16
LONGEST_NAME = 24


def sample_grid(
    generators: dict[str, Generator],
    *,
    classes: Sequence[int],
    class_names: Sequence[str],
    columns: int,
    batch_size: int = 64,
    progress: bool = False,
) -> Image.Image:
    """A picture with a block of rows x columns samples per generator, from the same noise.

    classes: labels of the rows; an unconditional model has one row per `columns` images.
    """
    rows = [class_names[label] for label in classes] if class_names else [""] * 4
    labels = [label for label in (classes if class_names else [0] * 4) for _ in range(columns)]
    blocks: dict[str, list[np.ndarray]] = {title: [] for title in generators}
    jobs = [(title, s) for title in generators for s in range(0, len(labels), batch_size)]
    with progress_bar(len(jobs), unit="batch", shown=progress) as bar:
        for title, start in jobs:
            part = labels[start : start + batch_size]
            images = generators[title](range(start, start + len(part)), part)
            blocks[title].append(images.pixels.numpy())
            bar.update()
    return draw_grid({title: np.concatenate(b) for title, b in blocks.items()}, rows, columns)


def draw_grid(blocks: dict[str, np.ndarray], rows: Sequence[str], columns: int) -> Image.Image:
    """Titles above the blocks, row names on the left. blocks: uint8 (rows * columns, H, W, C)."""
    font = ImageFont.load_default(size=FONT_SIZE)
    names = [name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…" for name in rows]
    margin = GAP * 2 + round(max(font.getlength(name) for name in names))
    height, width = next(iter(blocks.values())).shape[1:3]
    zoom = max(1, -(-TILE // min(height, width)))
    tile_h, tile_w = height * zoom + GAP, width * zoom + GAP
    title_w = round(max(font.getlength(title) for title in blocks))
    block_w = max(columns * tile_w, title_w) + GAP * 3
    header = FONT_SIZE + GAP * 2
    canvas = Image.new(
        "RGB", (margin + len(blocks) * block_w, header + len(rows) * tile_h), "white"
    )
    draw = ImageDraw.Draw(canvas)
    for row, name in enumerate(names):
        middle = header + row * tile_h + (tile_h - GAP) // 2
        draw.text((margin - GAP, middle), name, fill="black", font=font, anchor="rm")
    for place, (title, images) in enumerate(blocks.items()):
        left = margin + place * block_w
        draw.text((left, GAP), title, fill="black", font=font)
        for index, image in enumerate(images):
            row, column = divmod(index, columns)
            tile = Image.fromarray(np.broadcast_to(image, (height, width, 3)).copy())
            tile = tile.resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
            canvas.paste(tile, (left + column * tile_w, header + row * tile_h))
    return canvas
