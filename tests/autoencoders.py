"""Tiny autoencoders of random weights, one of each sort that a codec can be."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def kl(**options: object) -> nn.Module:
    """An AutoencoderKL of factor 2, 4 latent channels."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        **options,
    )


def tiny() -> nn.Module:
    """An AutoencoderTiny of factor 4."""
    from diffusers import AutoencoderTiny

    return AutoencoderTiny(
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1),
    )


def dc() -> nn.Module:
    """An AutoencoderDC of factor 4, with the scale of Sana's."""
    from diffusers import AutoencoderDC

    return AutoencoderDC(
        latent_channels=8,
        attention_head_dim=8,
        encoder_block_out_channels=(8, 8, 16),
        decoder_block_out_channels=(8, 8, 16),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
        scaling_factor=0.41407,
    )


MEAN, STD = [0.5, -0.2, 0.1, 1.0], [2.0, 0.5, 1.0, 4.0]
BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "scale": kl,
    "shift": lambda: kl(scaling_factor=1.5305, shift_factor=0.0609),  # Stable Diffusion 3's
    "channels": lambda: kl(scaling_factor=0.5, latents_mean=MEAN, latents_std=STD),
    "tiny": tiny,
    "dc": dc,
}


def random_autoencoder(sort: str) -> nn.Module:
    """That of `BUILDERS`, the same at every call."""
    torch.manual_seed(0)
    return BUILDERS[sort]().eval()
