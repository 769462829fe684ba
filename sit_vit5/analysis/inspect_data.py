"""Inspection of a data set or a latent cache: classes, sizes, oddities, statistics, a figure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from sit_vit5.codecs import Codec, local_codec, to_uint8
from sit_vit5.codecs.autoencoder import Normalisation, usual_std
from sit_vit5.codecs.cached import RecordedCodec
from sit_vit5.config import DataConfig, InspectConfig
from sit_vit5.data import Source, build_source, same_data
from sit_vit5.data.cache_writer import Layout, changed_line, encoded_images
from sit_vit5.data.fingerprints import changed_images
from sit_vit5.data.latent_cache import LatentCache, verify
from sit_vit5.data.loader import posterior_noise
from sit_vit5.data.sources import ImageSource
from sit_vit5.data.transforms import BadImage
from sit_vit5.sampling.grid import draw_grid
from sit_vit5.utils import rng
from sit_vit5.utils.errors import UserError, size_text
from sit_vit5.utils.files import save_image
from sit_vit5.utils.progress import progress_bar

if TYPE_CHECKING:
    from sit_vit5.data import Source
    from sit_vit5.data.latent_cache import LatentCache


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


def inspect_cache(cache: LatentCache, options: InspectConfig) -> None:
    """What a cache holds, whether it is what was written, and images from its latents."""
    codec = RecordedCodec.read(cache.codec, channels=cache.item_shape[0])
    codec = codec.normalised_by(options.codec)
    print(*describe_cache(cache, codec), sep="\n")
    if options.verify:
        problems = verify(cache)
        if problems:
            more = f" (and {len(problems) - 1} more such)" if len(problems) > 1 else ""
            raise UserError(problems[0] + more)
        print(f"verified: {len(cache.shards)} shards are as written, all numbers are finite")
        print(compare_with_images(cache))
    decoder = local_codec(codec, options.codec)
    if decoder is None:
        given = options.codec.path
        here = "on this machine" if given is None else f"what --codec.path {given} names"
        print(f"no picture: the autoencoder is not {here}; give it with --codec.path")
        return
    rows, chosen = picture_rows(cache)
    draw(rows, decoded(cache, chosen, codec, decoder), Path(options.out))


def compare_with_images(cache: LatentCache) -> str:
    """Whether the images are still those that were encoded, in words; UserError if not."""
    index, layout = cache.index, Layout.of(cache.index)
    again = "encode again into another --out"
    if index.images is None:
        return "note: which images were encoded is not recorded; they are not compared"
    path = index.images.path
    if path is not None and not Path(path).exists():
        return f"note: {path}, which was encoded, is not on this machine; it is not compared"
    source = build_source(DataConfig(**asdict(index.images), image_size=index.image_size))
    if len(source) != layout.count:
        raise UserError(
            f"{source.describe(0)} and the others are {len(source):,} images, {layout.count:,} "
            f"were encoded; {again}"
        )
    changed = changed_images(source, encoded_images(cache.root, layout))
    if changed:
        raise UserError(f"{changed_line(changed, source)}; run the encoding with --changed encode")
    if not same_data(index.data, source.identity):
        raise UserError(f"names or labels of the images changed since they were encoded; {again}")
    return f"verified: {layout.count:,} images are those that were encoded"


def describe_cache(cache: LatentCache, codec: RecordedCodec) -> list[str]:
    """Layout, codec, and the latents' mean and deviation against what a model expects."""
    size = sum((cache.root / shard.file).stat().st_size for shard in cache.shards)
    low, high = usual_std(codec.name)
    statistics = normalised_statistics(cache, codec)
    origin = ", ".join(f"{key} {value}" for key, value in codec.origin.items())
    lines = [
        f"cache: {cache.mirrors} mirrors x {' x '.join(map(str, cache.moments_shape))} "
        f"{cache.dtype}, {len(cache.shards)} shards, {size_text(size)}",
        f"codec: {codec.name} ({origin or codec.identity['name']})",
        f"latents: mean {statistics.overall_mean:+.3f}, standard deviation "
        f"{statistics.overall_std:.3f}, expected {low} to {high}",
    ]
    channels = zip(statistics.mean, statistics.std, strict=True)
    lines += [
        f"  channel {number}: mean {mean:+.3f}, standard deviation {std:.3f}"
        for number, (mean, std) in enumerate(channels)
    ]
    unusual = not low <= statistics.overall_std <= high
    if codec.name == "identity":
        if unusual:
            lines.append("warning: the deviation is unusual: the images are dark or flat")
        return lines
    if unusual:
        lines.append("warning: the deviation is unusual; check the codec and its scale")
    scales = Normalisation.of(codec.identity).scale
    if len(scales) == 1 and statistics.overall_std > 0:
        lines.append(
            f"scaling_factor {scales[0] / statistics.overall_std:.4g} in config.json of the "
            "autoencoder, or as --codec.scale of training on this cache, gives deviation 1.0"
        )
    return lines


@dataclass(frozen=True)
class LatentStatistics:
    """What a model sees. mean, std: of every channel."""

    mean: list[float]
    std: list[float]
    overall_mean: float
    overall_std: float


def normalised_statistics(cache: LatentCache, codec: RecordedCodec) -> LatentStatistics:
    """Mean and standard deviation of the latents that a model would see."""
    normalisation = Normalisation.of(codec.identity)
    scale, shift = (np.asarray(part) for part in (normalisation.scale, normalisation.shift))
    mean = (np.asarray(cache.raw_latents.mean) - shift) * scale
    std = np.asarray(cache.raw_latents.std) * scale
    overall = (std**2).mean() + mean.var()  # within the channels, and between them
    return LatentStatistics(mean.tolist(), std.tolist(), float(mean.mean()), float(overall**0.5))


def decoded(
    cache: LatentCache, indices: list[int], codec: RecordedCodec, decoder: Codec
) -> np.ndarray:
    """Images uint8 (n, H, W, C) from draws of these images' posteriors."""
    moments, _ = cache.batch(np.array(indices), np.zeros(len(indices), bool))
    noise = None
    if codec.draws_noise:
        noise = posterior_noise(0, cache.item_shape, 0, range(len(indices)))
    latents = codec.latents(torch.from_numpy(moments), noise)
    return to_uint8(decoder.decode(latents)).numpy()
