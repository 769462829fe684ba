"""The classes of a data set, and the picture that shows the first of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sit_vit5.data import Source
from sit_vit5.data.latent_cache import LatentCache
from sit_vit5.files import save_image
from sit_vit5.sampling.grid import draw_grid

ROWS, COLUMNS = 8, 4  # of the picture
LISTED = 10  # classes by name
SHOWN_FILES = 3
UNEVEN = 10  # largest class over smallest


def describe_classes(source: Source | LatentCache) -> list[str]:
    """Counts by class, the first few by name, and what is odd about them."""
    names, kind = source.class_names, source.identity["source"]
    if not names:
        return [f"{kind}: {len(source):,} images, no classes"]
    counts = np.bincount(source.labels, minlength=len(names))
    lines = [f"{kind}: {len(source):,} images, {len(names):,} classes"]
    for label, name in enumerate(names[:LISTED]):
        first = np.flatnonzero(source.labels == label)[:SHOWN_FILES]
        # Elsewhere images have no files of their own.
        named = kind == "folder"
        files = ", ".join(Path(source.describe(int(index))).name for index in first if named)
        lines.append(f"  {label:>4} {name:<24} {counts[label]:>9,}   {files}".rstrip())
    if len(names) > LISTED:
        lines.append(f"  ... and {len(names) - LISTED:,} more")
    low, high = int(counts.argmin()), int(counts.argmax())
    lines.append(
        f"images per class: {counts[low]:,} ({names[low]}) to {counts[high]:,} ({names[high]})"
    )
    empty = [names[label] for label in np.flatnonzero(counts == 0)]
    if empty:
        lines.append(f"warning: {len(empty)} classes have no image: {', '.join(empty[:LISTED])}")
    elif counts[high] > UNEVEN * counts[low]:
        lines.append("warning: the classes are very uneven; samples of the small ones will be poor")
    return lines


def picture_rows(source: Source | LatentCache) -> tuple[list[str], list[int]]:
    """Names of the rows and the images in them, by index: the first of the first classes."""
    if not source.class_names:
        count = min(ROWS * COLUMNS, len(source))
        return [""] * -(-count // COLUMNS), list(range(count))
    rows, chosen = [], []
    for label in np.unique(source.labels)[:ROWS]:
        found = np.flatnonzero(source.labels == label)[:COLUMNS]
        rows.append(source.class_names[label])
        chosen += [int(found[place % len(found)]) for place in range(COLUMNS)]
    return rows, chosen


def draw(rows: list[str], images: np.ndarray, path: Path) -> None:
    """Writes the picture and prints its path. images: uint8 (n, H, W, C), COLUMNS per row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_image(path, draw_grid({"": images}, rows, COLUMNS))
    print(path)
