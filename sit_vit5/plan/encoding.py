"""What the codec adds to a training step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sit_vit5.codecs import build_codec
from sit_vit5.codecs.autoencoder_kl import AT_ONCE
from sit_vit5.config import CodecConfig
from sit_vit5.models.cost import count_flops
from sit_vit5.plan.memory import call_peak

SD_VAES = ("sd-vae-ema", "sd-vae-mse")


@dataclass(frozen=True)
class Encoding:
    """flops: of one image, in fp32; weights, working: bytes; note: what is not counted, or None."""

    factor: int
    latent_shape: tuple[int, int, int]
    flops: int = 0
    weights: int = 0
    working: int = 0
    note: str | None = None


def encoding(
    codec: CodecConfig, image_shape: tuple[int, int, int], micro_batch_size: int
) -> Encoding:
    """Cost of encoding images (C, H, W). Needs neither the hub nor the autoencoder's weights."""
    if codec.name in SD_VAES:
        return _autoencoder(codec, image_shape, micro_batch_size)
    built = build_codec(codec.name, codec.path)
    note = None if codec.name == "identity" else f"the codec {codec.name} is not counted"
    return Encoding(built.factor, built.latent_shape(image_shape), note=note)


def _autoencoder(
    codec: CodecConfig, image_shape: tuple[int, int, int], micro_batch_size: int
) -> Encoding:
    with torch.device("meta"):
        vae = _build(codec.path)
        flops = count_flops(lambda: vae.encode(torch.empty(1, *image_shape))).get_total_flops()
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    with FakeTensorMode():
        vae = _build(codec.path)
        images = torch.empty(min(micro_batch_size, AT_ONCE), *image_shape)
        working = call_peak(vae, lambda: vae.encode(images).latent_dist.std)
    return Encoding(
        factor,
        (vae.config.latent_channels, image_shape[1] // factor, image_shape[2] // factor),
        flops=flops,
        weights=sum(4 * p.numel() for p in vae.parameters()),
        working=working,
    )


def _build(path: str | None) -> torch.nn.Module:
    """The autoencoder in a local folder, or Stable Diffusion's, without its weights."""
    # Imported here: diffusers takes seconds, and pixels need none of it.
    from diffusers import AutoencoderKL

    if path is not None and Path(path).is_dir():
        return AutoencoderKL.from_config(AutoencoderKL.load_config(path))
    # config.json of stabilityai/sd-vae-ft-ema and sd-vae-ft-mse.
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=4,
        norm_num_groups=32,
    )
