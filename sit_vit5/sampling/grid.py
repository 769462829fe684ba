"""Labelled grids of samples: one row per class, one block per set of weights; previews of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sit_vit5.codecs import Codec, build_codec, local_codec
from sit_vit5.codecs.cached import RecordedCodec
from sit_vit5.config import TrainConfig
from sit_vit5.flow.predictions import Flow
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.sampling.field import Guidance, guidance_scale_or_default
from sit_vit5.sampling.generator import Generator, Settings, find_classes
from sit_vit5.sampling.load import LoadedModel
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import check_output, save_image
from sit_vit5.utils.memory import check_memory, memory_errors
from sit_vit5.utils.progress import progress_bar
from sit_vit5.utils.run_folder import SAMPLES, run_of, step_name

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


FRAME_MS, LAST_FRAME_MS = 120, 1500
ROWS = 4  # where no classes are given


def rows(wanted: Sequence[str], class_names: Sequence[str]) -> tuple[list[int], list[str]]:
    """Labels and names of the rows: the wanted classes, or the first few."""
    labels = find_classes(wanted, class_names)
    labels = labels if wanted else labels[:ROWS]
    if not class_names:
        return [0], [""]
    return labels, [class_names[label] for label in labels]


def title(loaded: LoadedModel, weights: str) -> str:
    """One line on the settings that made the images."""
    step, guidance = loaded.checkpoint.state.step, loaded.generator.settings.guidance
    return f"step {step}, {weights}, guidance {guidance.scale:g}"


def picture_path(out: str | None, loaded: LoadedModel, *, name: str) -> Path:
    """`out`, or NAME_STEP.png in the run's samples; refused now if it cannot be written."""
    file = f"{name}_{step_name(loaded.checkpoint.state.step)}.png"
    path = Path(out or run_of(loaded.checkpoint.folder) / SAMPLES / file)
    check_output(path)
    return path


def check_drawing(count: int, loaded: LoadedModel, *, use: str) -> None:
    """Refuses more images than the memory holds, before they are made. use: what to do."""
    state = loaded.checkpoint.state
    shape = loaded.generator.codec.image_shape((state.in_channels, *state.input_size))
    check_memory(count * math.prod(shape), f"a figure of {count:,} images", use=use)


def decimals(values: Sequence[float]) -> list[str]:
    """Texts of one length: two decimals where they say all, else three."""
    digits = 2 if all(abs(value - round(value, 2)) < 1e-6 for value in values) else 3
    return [f"{value:.{digits}f}" for value in values]


def moves(path: Path) -> bool:
    """True if the file is an animation."""
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


def preview_codec(config: TrainConfig, codec: Codec | RecordedCodec) -> Codec | None:
    """Decoder of the grids: the codec itself; for a latent cache, one on this machine.

    That is preview.decoder, else the cache's own codec, else a tiny decoder of the same latents.
    None: none of them is here, or no grids are wanted.
    """
    if not isinstance(codec, RecordedCodec):
        if config.preview.decoder is not None:
            raise UserError(
                "preview.decoder is for latent caches, images have their own codec; drop it"
            )
        return codec
    if config.preview.every == 0:
        return None
    if config.preview.decoder is not None:
        return build_codec("taesd", config.preview.decoder)
    return local_codec(codec, config.codec)


class GridPreview:
    """Draws every named network from the same noise, at each call the same noise again."""

    def __init__(self, config: TrainConfig, codec: Codec, class_names: tuple[str, ...]):
        self.config, self.codec, self.class_names = config.preview, codec, class_names
        objective = config.objective
        self.flow = Flow(objective.interpolant, objective.prediction)
        scale = guidance_scale_or_default(
            config.preview.guidance_scale,
            class_names=class_names,
            class_dropout=objective.class_dropout,
        )
        self.settings = Settings(
            method=config.preview.method,
            steps=config.preview.steps,
            shift=objective.shift,
            guidance=Guidance(scale),
            precision=config.precision,
            attention=config.attention,
            seed=config.seed,
        )

    def __call__(self, networks: dict[str, Denoiser], path: Path) -> None:
        """Writes the grid to `path`."""
        generators = {
            name: Generator(network, self.codec, self.flow, self.settings)
            for name, network in networks.items()
        }
        grid = sample_grid(
            generators,
            classes=range(min(self.config.classes, len(self.class_names))),
            class_names=self.class_names,
            columns=self.config.columns,
        )
        save_image(path, grid)
