"""Pixels as latents."""

from __future__ import annotations

from torch import Tensor


class IdentityCodec:
    """Latents are the images."""

    factor = 1
    draws_noise = False
    identity = {"name": "identity"}  # noqa: RUF012 (constant)
    origin = {}  # noqa: RUF012 (constant)

    def latent_shape(self, image_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        return image_shape

    def image_shape(self, latent_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        channels, height, width = latent_shape
        return height, width, channels

    def encode(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        del noise
        return images

    def moments(self, images: Tensor) -> Tensor:
        return images

    def latents(self, moments: Tensor, noise: Tensor | None = None) -> Tensor:
        del noise
        return moments

    def decode(self, latents: Tensor) -> Tensor:
        return latents
