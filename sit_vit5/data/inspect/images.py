"""What the images of a data set are like."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sit_vit5 import rng
from sit_vit5.config import InspectConfig
from sit_vit5.data.image_source import ImageSource
from sit_vit5.data.images import BadImage
from sit_vit5.data.inspect.classes import LISTED, draw, picture_rows
from sit_vit5.errors import UserError
from sit_vit5.progress import progress_bar


def inspect_images(source: ImageSource, options: InspectConfig) -> None:
    """Decodes images, says what was found, draws the first classes."""
    indices = np.arange(len(source))
    if not options.verify and len(source) > options.sample:
        order = rng.generator(0, "inspect").permutation(len(source))
        indices = np.sort(order[: options.sample])
    sizes, bad = look(source, indices)
    print(*describe_sizes(sizes, bad, options.data.image_size), sep="\n")
    rows, chosen = picture_rows(source)
    if not len(sizes):
        raise UserError("no image can be decoded; look at the files named above")
    draw(rows, decodable(source, chosen), Path(options.out))
    if options.verify and bad:
        raise UserError(
            f"{len(bad)} of {len(source):,} images cannot be decoded; remove them, or train with "
            "--data.on-bad-image skip"
        )


def look(source: ImageSource, indices: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Width and height of the whole images, (n, 2), and why the others cannot be decoded."""
    sizes, bad = [], []
    with progress_bar(len(indices), unit="image", title="decode") as bar:
        for index in indices:
            try:
                sizes.append(source.checked_picture(int(index)).size)
            except BadImage as error:
                bad.append(str(error))
            bar.update()
    return np.array(sizes).reshape(-1, 2), bad


def describe_sizes(sizes: np.ndarray, bad: list[str], image_size: int) -> list[str]:
    """What the decoded images are like."""
    lines = [f"decoded: {len(sizes):,} images"]
    for axis, name in enumerate(("width", "height")) if len(sizes) else ():
        side = sizes[:, axis]
        lines.append(f"  {name}: {side.min()} to {side.max()}, median {int(np.median(side))}")
    small = int((sizes.min(axis=1) < image_size).sum()) if len(sizes) else 0
    if small:
        lines.append(f"warning: {small:,} are smaller than {image_size} pixels and are enlarged")
    if bad:
        lines.append(f"warning: {len(bad):,} cannot be decoded:")
        lines += [f"  {line}" for line in bad[:LISTED]]
    return lines


def decodable(source: ImageSource, indices: list[int]) -> np.ndarray:
    """The cropped images, uint8 (n, H, W, C); one that cannot be decoded is grey."""
    channels, height, width = source.item_shape
    images = np.full((len(indices), height, width, channels), 128, np.uint8)
    for place, index in enumerate(indices):
        try:
            images[place] = source.load(index)[0]
        except BadImage:
            continue
    return images
