"""Whether a latent cache holds what training needs, shown as numbers and as decoded images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from sit_vit5.codecs import Codec, local_codec, to_uint8
from sit_vit5.codecs.normalisation import USUAL_STD, Normalisation
from sit_vit5.codecs.recorded import RecordedCodec
from sit_vit5.config import InspectConfig
from sit_vit5.data.inspect.classes import draw, picture_rows
from sit_vit5.data.latent_cache import LatentCache
from sit_vit5.data.loader import posterior_noise
from sit_vit5.data.verify import verify
from sit_vit5.errors import UserError


def inspect_cache(cache: LatentCache, options: InspectConfig) -> None:
    """What a cache holds, whether it is what was written, and images from its latents."""
    codec = RecordedCodec.read(cache.codec, channels=cache.item_shape[0])
    print(*describe_cache(cache, codec), sep="\n")
    if options.verify:
        problems = verify(cache)
        if problems:
            more = f" (and {len(problems) - 1} more such)" if len(problems) > 1 else ""
            raise UserError(problems[0] + more)
        print(f"verified: {len(cache.shards)} shards are as written, all numbers are finite")
    decoder = local_codec(codec, options.codec.path)
    if decoder is None:
        given = options.codec.path
        here = "on this machine" if given is None else f"what --codec.path {given} names"
        print(f"no picture: the autoencoder is not {here}; give it with --codec.path")
        return
    rows, chosen = picture_rows(cache)
    draw(rows, decoded(cache, chosen, codec, decoder), Path(options.out))


def describe_cache(cache: LatentCache, codec: RecordedCodec) -> list[str]:
    """Layout, codec, and the latents' mean and deviation against what a model expects (row T28)."""
    size = sum((cache.root / shard.file).stat().st_size for shard in cache.shards)
    mean, std = normalised_statistics(cache, codec)
    low, high = USUAL_STD
    usual = low <= std <= high
    origin = ", ".join(f"{key} {value}" for key, value in codec.origin.items())
    return [
        f"cache: {cache.mirrors} mirrors x {' x '.join(map(str, cache.moments_shape))} "
        f"{cache.dtype}, {len(cache.shards)} shards, {size / 1e9:.2f} GB",
        f"codec: {codec.name} ({origin or codec.identity['name']})",
        f"latents: mean {mean:+.3f}, standard deviation {std:.3f}, expected {low} to {high}",
        *([] if usual else ["warning: the deviation is unusual; check the codec and its scale"]),
    ]


def normalised_statistics(cache: LatentCache, codec: RecordedCodec) -> tuple[float, float]:
    """Mean and standard deviation of all numbers that a model would see."""
    normalisation = Normalisation.of(codec.identity)
    scale, shift = (np.asarray(part) for part in (normalisation.scale, normalisation.shift))
    mean = (np.asarray(cache.raw_latents.mean) - shift) * scale
    variance = (np.asarray(cache.raw_latents.std) * scale) ** 2
    overall = variance.mean() + mean.var()  # within the channels, and between them
    return float(mean.mean()), float(np.sqrt(overall))


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
