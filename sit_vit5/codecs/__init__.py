"""Pixels to normalised latents and back. One object owns scale and shift.

A new codec is one class and one line in `CODECS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from sit_vit5.codecs.autoencoder_kl import AutoencoderKLCodec
from sit_vit5.codecs.identity import IdentityCodec
from sit_vit5.errors import choose


class Codec(Protocol):
    """Images are fp32 (B, C, H, W) in [-1, 1]; latents fp32 (B, c, h, w) near unit scale.

    draws_noise: `encode` wants standard normal noise of the latents' shape (else None will do).
    """

    factor: int
    draws_noise: bool
    identity: dict

    def latent_shape(self, image_shape: tuple[int, int, int]) -> tuple[int, int, int]: ...

    def image_shape(self, latent_shape: tuple[int, int, int]) -> tuple[int, int, int]: ...

    def encode(self, images: Tensor, noise: Tensor | None) -> Tensor: ...

    def decode(self, latents: Tensor) -> Tensor: ...


CODECS: dict[str, Callable[[str | None], Codec]] = {
    "identity": IdentityCodec,
    "sd-vae-ema": lambda path: AutoencoderKLCodec.load(path or "stabilityai/sd-vae-ft-ema"),
    "sd-vae-mse": lambda path: AutoencoderKLCodec.load(path or "stabilityai/sd-vae-ft-mse"),
}


def build_codec(name: str, path: str | None = None) -> Codec:
    """The codec called `name`; path: local folder or hub id instead of the name's own."""
    return choose("codec", name, CODECS)(path)


def to_uint8(images: Tensor) -> Tensor:
    """floor(clamp(127.5 * x + 128, 0, 255)) as DiT, SiT and ADM: (B, C, H, W) -> (B, H, W, C)."""
    return (127.5 * images + 128).clamp(0, 255).byte().permute(0, 2, 3, 1)
