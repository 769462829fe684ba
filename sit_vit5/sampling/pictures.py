"""What the drawing commands share: rows, titles, file names, strips and animations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from sit_vit5.files import check_output, save_image
from sit_vit5.memory import check_memory
from sit_vit5.run_folder import SAMPLES, run_of, step_name
from sit_vit5.sampling.generator import find_classes
from sit_vit5.sampling.load import Loaded

FRAME_MS, LAST_FRAME_MS = 120, 1500
ROWS = 4  # where no classes are given


def rows(wanted: Sequence[str], class_names: Sequence[str]) -> tuple[list[int], list[str]]:
    """Labels and names of the rows: the wanted classes, or the first few."""
    labels = find_classes(wanted, class_names)
    labels = labels if wanted else labels[:ROWS]
    if not class_names:
        return [0], [""]
    return labels, [class_names[label] for label in labels]


def title(loaded: Loaded, weights: str) -> str:
    """What made the images, in a line."""
    step, guidance = loaded.checkpoint.state.step, loaded.generator.settings.guidance
    return f"step {step}, {weights}, guidance {guidance.scale:g}"


def picture_path(out: str | None, loaded: Loaded, *, name: str) -> Path:
    """`out`, or NAME_STEP.png in the run's samples; refused now if it cannot be written."""
    file = f"{name}_{step_name(loaded.checkpoint.state.step)}.png"
    path = Path(out or run_of(loaded.checkpoint.folder) / SAMPLES / file)
    check_output(path)
    return path


def check_drawing(count: int, loaded: Loaded, *, use: str) -> None:
    """Refuses more images than the memory holds, before they are made. use: what to do."""
    state = loaded.checkpoint.state
    shape = loaded.generator.codec.image_shape((state.in_channels, *state.input_size))
    check_memory(count * math.prod(shape), f"a figure of {count:,} images", use=use)


def decimals(values: Sequence[float]) -> list[str]:
    """Texts of one length: two decimals where they say all, else three."""
    digits = 2 if all(abs(value - round(value, 2)) < 1e-6 for value in values) else 3
    return [f"{value:.{digits}f}" for value in values]


def moves(path: Path) -> bool:
    """Whether the file is an animation."""
    return path.suffix.lower() != ".png"


def save_animation(path: Path, frames: Sequence[Image.Image]) -> None:
    """Writes a GIF or WebP that runs for ever and rests on the last frame."""
    # Equal sizes: a title may be narrower in one frame than in another.
    size = tuple(max(frame.size[axis] for frame in frames) for axis in (0, 1))
    canvases = [Image.new("RGB", size, "white") for _ in frames]
    for canvas, frame in zip(canvases, frames, strict=True):
        canvas.paste(frame)
    durations = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    options = {"save_all": True, "append_images": canvases[1:], "duration": durations, "loop": 0}
    if path.suffix.lower() == ".webp":
        options["lossless"] = True
    save_image(path, canvases[0], **options)
