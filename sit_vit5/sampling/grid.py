"""Labelled grids: one row per class, one block per set of weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sit_vit5.memory import check_memory, memory_errors
from sit_vit5.progress import progress_bar
from sit_vit5.sampling.generator import Generator

GAP = 4
LINE_GAP = 12  # added after the lines that belong together
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
    blocks = make_images(generators, labels, batch_size=batch_size, progress=progress)
    return draw_grid(blocks, rows, columns)


def make_images(
    generators: dict[str, Generator], labels: Sequence[int], *, batch_size: int, progress: bool
) -> dict[str, np.ndarray]:
    """Image i of labels[i] from every generator, uint8 (len(labels), H, W, C)."""
    _check_size(generators, len(labels))
    blocks: dict[str, list[np.ndarray]] = {title: [] for title in generators}
    jobs = [(title, s) for title in generators for s in range(0, len(labels), batch_size)]
    with progress_bar(len(jobs), unit="batch", shown=progress) as bar:
        for title, start in jobs:
            part = labels[start : start + batch_size]
            with memory_errors("lower --batch-size"):
                images = generators[title](range(start, start + len(part)), part)
            blocks[title].append(images.pixels.numpy())
            bar.update()
    return {title: np.concatenate(parts) for title, parts in blocks.items()}


def _check_size(generators: dict[str, Generator], count: int) -> None:
    """Refuses more images than the memory holds, as arrays and on the canvas."""
    need = 0
    for generator in generators.values():
        model = generator.model
        height, width, channels = generator.codec.image_shape(
            (model.in_channels, *model.input_size)
        )
        zoom = max(1, -(-TILE // min(height, width)))
        need += count * height * width * (channels + 3 * zoom**2)
    check_memory(
        need, f"a grid of {count:,} images", use="ask for fewer classes, columns or frames"
    )


def draw_grid(
    blocks: dict[str, np.ndarray],
    rows: Sequence[str],
    columns: int,
    *,
    headings: Sequence[str] = (),
    lines: int = 1,
) -> Image.Image:
    """Titles above the blocks, headings above their columns, row names on the left.

    blocks: uint8 (rows * columns, H, W, C); lines: rows that belong together, with a gap after.
    """
    font = ImageFont.load_default(size=FONT_SIZE)
    names = [name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…" for name in rows]
    margin = GAP * 2 + _longest(font, names)
    height, width = next(iter(blocks.values())).shape[1:3]
    zoom = max(1, -(-TILE // min(height, width)))
    size = (width * zoom, height * zoom)
    pitch = max(size[0], _longest(font, headings)) + GAP
    block_w = max(columns * pitch, _longest(font, blocks)) + GAP * 3
    line_h = FONT_SIZE + GAP * 2
    header = line_h * (2 if any(headings) else 1)
    gap = LINE_GAP if lines > 1 else 0
    tops = [header + row * (size[1] + GAP) + row // lines * gap for row in range(len(rows))]
    canvas = Image.new("RGB", (margin + len(blocks) * block_w, tops[-1] + size[1] + GAP), "white")
    draw = ImageDraw.Draw(canvas)
    for name, top in zip(names, tops, strict=True):
        draw.text((margin - GAP, top + size[1] // 2), name, fill="black", font=font, anchor="rm")
    for place, (title, images) in enumerate(blocks.items()):
        left = margin + place * block_w
        draw.text((left, GAP), title, fill="black", font=font)
        for column, text in enumerate(headings):
            middle = left + column * pitch + size[0] // 2
            draw.text((middle, line_h * 3 // 2), text, fill="black", font=font, anchor="mm")
        for index, image in enumerate(images):
            row, column = divmod(index, columns)
            canvas.paste(_enlarged(image, size), (left + column * pitch, tops[row]))
    return canvas


def _longest(font: ImageFont.FreeTypeFont, texts: Iterable[str]) -> int:
    """Width in pixels of the widest text; 0 without any."""
    return max((round(font.getlength(text)) for text in texts), default=0)


def _enlarged(image: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """(H, W, 1 or 3) as a picture of the size, without blurring."""
    tile = Image.fromarray(np.broadcast_to(image, (*image.shape[:2], 3)).copy())
    return tile.resize(size, Image.Resampling.NEAREST)
