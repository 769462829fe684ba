"""Pixels to normalised latents and back. One object owns scale and shift.

A new codec is one class and one line in `CODECS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from sit_vit5.codecs.autoencoder_kl import AutoencoderKLCodec
from sit_vit5.codecs.identity import IdentityCodec
from sit_vit5.codecs.recorded import RecordedCodec
from sit_vit5.errors import UserError, choose


class Codec(Protocol):
    """Images are fp32 (B, C, H, W) in [-1, 1]; latents fp32 (B, c, h, w) near unit scale.

    draws_noise: `encode` and `latents` want standard normal noise of the latents' shape (else None
    will do), and `moments` gives means and log-variances, (B, 2c, h, w) instead of (B, c, h, w).
    identity: what tells it from another codec, compared. origin: where its weights came from.
    """

    factor: int
    draws_noise: bool
    identity: dict
    origin: dict

    def latent_shape(self, image_shape: tuple[int, int, int]) -> tuple[int, int, int]: ...

    def image_shape(self, latent_shape: tuple[int, int, int]) -> tuple[int, int, int]: ...

    def encode(self, images: Tensor, noise: Tensor | None) -> Tensor: ...

    def moments(self, images: Tensor) -> Tensor:
        """What a latent cache holds: raw, before the draw and the normalisation."""
        ...

    def latents(self, moments: Tensor, noise: Tensor | None) -> Tensor:
        """The second half of `encode`."""
        ...

    def decode(self, latents: Tensor) -> Tensor: ...


# By name: the codec from a path (None: its own hub id), from this machine alone if asked.
CODECS: dict[str, Callable[[str | None, bool], Codec]] = {
    "identity": lambda path, local: IdentityCodec(path),
    "sd-vae-ema": lambda path, local: AutoencoderKLCodec.load(
        path or "stabilityai/sd-vae-ft-ema", local_only=local
    ),
    "sd-vae-mse": lambda path, local: AutoencoderKLCodec.load(
        path or "stabilityai/sd-vae-ft-mse", local_only=local
    ),
}
# Tiny decoders of the same latents.
TINY: dict[str, str] = {}


def build_codec(name: str, path: str | None = None, *, local_only: bool = False) -> Codec:
    """The codec called `name`; path: local folder or hub id instead of the name's own."""
    return choose("codec", name, CODECS)(path, local_only)


def local_codec(recorded: RecordedCodec, path: str | None) -> Codec | None:
    """What decodes a cache's latents without a download: its codec, else a tiny one of the same."""
    own = _on_this_machine(recorded.name, path)
    if own is not None and own.identity == recorded.identity:
        return own
    return _on_this_machine(TINY[recorded.name], None) if recorded.name in TINY else None


def _on_this_machine(name: str, path: str | None) -> Codec | None:
    try:
        return build_codec(name, path, local_only=True)
    except UserError:
        return None


def to_uint8(images: Tensor) -> Tensor:
    """floor(clamp(127.5 * x + 128, 0, 255)) as DiT, SiT and ADM: (B, C, H, W) -> (B, H, W, C)."""
    return (127.5 * images + 128).clamp(0, 255).byte().permute(0, 2, 3, 1)
