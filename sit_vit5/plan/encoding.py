"""What the codec adds to a training step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sit_vit5.codecs import configured_codec
from sit_vit5.codecs.autoencoder import AT_ONCE
from sit_vit5.codecs.loading import AUTOENCODERS, KINDS, build, find
from sit_vit5.config import CodecConfig
from sit_vit5.models.cost import count_flops
from sit_vit5.plan.memory import call_peak

FP32 = 4  # bytes
# config.json of stabilityai/sd-vae-ft-ema and sd-vae-ft-mse.
STABLE_DIFFUSION = {
    "_class_name": "AutoencoderKL",
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 4,
    "norm_num_groups": 32,
}
# What is counted where no folder is given; TAESD has diffusers' default values.
PUBLISHED = {
    "sd-vae-ema": STABLE_DIFFUSION,
    "sd-vae-mse": STABLE_DIFFUSION,
    "taesd": {"_class_name": "AutoencoderTiny"},
}


@dataclass(frozen=True)
class Encoding:
    """flops: of one image, in fp32; weights, working: bytes; note: what is not counted, or None.

    moments: numbers that a latent cache holds of one image.
    """

    factor: int
    latent_shape: tuple[int, int, int]
    flops: int = 0
    moments: int = 0
    weights: int = 0
    working: int = 0
    note: str | None = None


@dataclass(frozen=True)
class Cache:
    """Encoding everything once. mirrors: of every image; seconds: on all GPUs together."""

    images: int
    mirrors: int
    bytes: int
    seconds: float


def cache(encoded: Encoding, images: int, *, mirrors: int, flops_per_second: float) -> Cache:
    """What `python -m sit_vit5.data.encode` would write and take, in its default float32."""
    visits = images * mirrors
    seconds = visits * encoded.flops / flops_per_second
    return Cache(images, mirrors, visits * encoded.moments * FP32, seconds)


def encoding(
    codec: CodecConfig, image_shape: tuple[int, int, int], micro_batch_size: int
) -> Encoding:
    """Cost of encoding images (C, H, W). Needs no weights, nor the hub for what is published."""
    if codec.name in AUTOENCODERS:
        return _autoencoder(_config(codec), image_shape, micro_batch_size)
    built = configured_codec(codec)
    note = None if codec.name == "identity" else f"the codec {codec.name} is not counted"
    return Encoding(built.factor, built.latent_shape(image_shape), note=note)


def _config(codec: CodecConfig) -> dict:
    """config.json of the autoencoder in a local folder, else the published one."""
    if codec.name in PUBLISHED and not (codec.path is not None and Path(codec.path).is_dir()):
        return PUBLISHED[codec.name]
    return find(codec.name, codec.path, local_only=False).config


def _autoencoder(
    config: dict, image_shape: tuple[int, int, int], micro_batch_size: int
) -> Encoding:
    kind = KINDS[config["_class_name"]]
    with torch.device("meta"):
        vae = build(config)
        flops = count_flops(lambda: vae.encode(torch.empty(1, *image_shape))).get_total_flops()
    factor = kind.factor(vae.config)
    with FakeTensorMode():
        vae = build(config)
        images = torch.empty(min(micro_batch_size, AT_ONCE), *image_shape)
        working = call_peak(vae, lambda: kind.moments(vae.encode(images)))
    size = image_shape[1] // factor, image_shape[2] // factor
    channels = vae.config.latent_channels
    return Encoding(
        factor,
        (channels, *size),
        flops=flops,
        moments=channels * (2 if kind.draws_noise else 1) * math.prod(size),
        weights=sum(4 * p.numel() for p in vae.parameters()),
        working=working,
    )
