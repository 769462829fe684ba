"""Whether a latent cache holds what training needs, shown as numbers and as decoded images."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from sit_vit5.codecs import Codec, local_codec, to_uint8
from sit_vit5.codecs.normalisation import Normalisation, usual_std
from sit_vit5.codecs.recorded import RecordedCodec
from sit_vit5.config import DataConfig, InspectConfig
from sit_vit5.data import build_source, same_data
from sit_vit5.data.cache_writer import Layout, changed_line, encoded_images
from sit_vit5.data.fingerprints import changed_images
from sit_vit5.data.inspect.classes import draw, picture_rows
from sit_vit5.data.latent_cache import LatentCache
from sit_vit5.data.loader import posterior_noise
from sit_vit5.data.verify import verify
from sit_vit5.errors import UserError, size_text


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
    """Layout, codec, and the latents' mean and deviation against what a model expects (row T28)."""
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
