"""Pixels to normalised latents and back. One object owns scale and shift.

A new codec is one class and one line in `CODECS`; a new class of diffusers one line in
`loading.KINDS`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Protocol

from torch import Tensor

from sit_vit5.codecs.autoencoder import AUTOENCODERS, AutoencoderCodec
from sit_vit5.codecs.cached import RecordedCodec
from sit_vit5.codecs.identity import IdentityCodec
from sit_vit5.config import CodecConfig
from sit_vit5.utils.errors import UserError, choose


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
        """Content of a latent cache: raw moments, before the draw and the normalisation.

        Raises `autoencoder.NonFiniteLatents`, which names the images.
        """
        ...

    def latents(self, moments: Tensor, noise: Tensor | None) -> Tensor:
        """The second half of `encode`."""
        ...

    def decode(self, latents: Tensor) -> Tensor: ...


class Build(Protocol):
    """path: a local folder or hub id, None for the codec's own. local_only: no network.

    scale, shift: instead of those that the autoencoder's configuration gives.
    """

    def __call__(
        self, path: str | None, *, local_only: bool, scale: float | None, shift: float | None
    ) -> Codec: ...


def _identity(
    path: str | None, *, local_only: bool, scale: float | None, shift: float | None
) -> Codec:
    del local_only
    for name, value in (("path", path), ("scale", scale), ("shift", shift)):
        if value is not None:
            raise UserError(f"codec.{name} {value} has no effect on codec identity; drop it")
    return IdentityCodec()


CODECS: dict[str, Build] = {"identity": _identity}
CODECS |= {name: partial(AutoencoderCodec.load, name) for name in AUTOENCODERS}
# Tiny decoders of the same latents. TAESD learned Stable Diffusion's with their scale in, so its
# own scaling_factor is 1.
TINY: dict[str, str] = {"sd-vae-ema": "taesd", "sd-vae-mse": "taesd"}
STABLE_DIFFUSION_SCALE = 0.18215


def build_codec(
    name: str,
    path: str | None = None,
    *,
    local_only: bool = False,
    scale: float | None = None,
    shift: float | None = None,
) -> Codec:
    """The codec called `name`; path: local folder or hub id instead of the name's own."""
    build = choose("codec", name, CODECS)
    return build(path, local_only=local_only, scale=scale, shift=shift)


def configured_codec(
    config: CodecConfig, *, path: str | None = None, local_only: bool = False
) -> Codec:
    """The codec of a configuration; path: where it is now, if not where the configuration says."""
    return build_codec(
        config.name,
        path or config.path,
        local_only=local_only,
        scale=config.scale,
        shift=config.shift,
    )


def local_codec(recorded: RecordedCodec, config: CodecConfig) -> Codec | None:
    """Decoder of a cache's latents without a download: its codec, else a tiny one of the same."""
    own = _on_this_machine(replace(config, name=recorded.name))
    if own is not None and own.identity == recorded.identity:
        return own
    # --codec.path may have named another autoencoder, with another scale and other latents.
    if recorded.name in TINY and recorded.identity.get("scale") == STABLE_DIFFUSION_SCALE:
        return _on_this_machine(CodecConfig(TINY[recorded.name]))
    return None


def _on_this_machine(config: CodecConfig) -> Codec | None:
    try:
        return configured_codec(config, local_only=True)
    except UserError:
        return None


def to_uint8(images: Tensor) -> Tensor:
    """floor(clamp(127.5 * x + 128, 0, 255)) as DiT, SiT and ADM: (B, C, H, W) -> (B, H, W, C)."""
    return (127.5 * images + 128).clamp(0, 255).byte().permute(0, 2, 3, 1)
