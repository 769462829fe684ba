"""Stable Diffusion's autoencoder by diffusers, with the scale of DiT and SiT."""

from __future__ import annotations

import hashlib
import logging
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sit_vit5.codecs.normalisation import Normalisation, draw_latents
from sit_vit5.errors import UserError

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

# Images per call: at 256 pixels a larger batch takes tens of gigabytes and is no faster.
AT_ONCE = 16


class AutoencoderKLCodec:
    """latents = scale * (mean + std * noise); runs in fp32 (fp16 encoders return NaN, row D10)."""

    draws_noise = True

    def __init__(self, vae: AutoencoderKL, origin: dict | None = None):
        self.origin = origin or {}
        self.vae = vae.float().eval().requires_grad_(False)
        self.normalisation = Normalisation(scale=(vae.config.scaling_factor,))
        self.factor = 2 ** (len(vae.config.block_out_channels) - 1)

    @classmethod
    def load(cls, source: str, *, local_only: bool = False) -> AutoencoderKLCodec:
        """source: local folder or hub id. local_only: no download."""
        # Imported here: diffusers takes seconds, and pixels need none of it.
        from diffusers import AutoencoderKL

        logging.getLogger("diffusers").setLevel(logging.ERROR)
        try:
            vae = AutoencoderKL.from_pretrained(
                source, use_safetensors=True, local_files_only=local_only
            )
        except Exception as error:  # diffusers raises OSError, ValueError, hub and HTTP errors
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"cannot load the autoencoder {source!r} ({first_line}); give a local folder with "
                "--codec.path (sampling: --codec-path), or train on pixels: --codec.name identity"
            ) from None
        return cls(vae, {"id": source})

    @cached_property
    def identity(self) -> dict:
        """What tells this autoencoder from another (row D8)."""
        digest = {"sha256": _digest(self.vae)}
        return {"name": "autoencoder_kl"} | self.normalisation.record() | digest

    def latent_shape(self, image_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """(C, H, W) of an image to (c, h, w) of its latents."""
        _, height, width = image_shape
        return self.vae.config.latent_channels, height // self.factor, width // self.factor

    def image_shape(self, latent_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """(c, h, w) of latents to (H, W, C) of the decoded image."""
        _, height, width = latent_shape
        return height * self.factor, width * self.factor, self.vae.config.out_channels

    def encode(self, images: Tensor, noise: Tensor) -> Tensor:
        """A draw of the posterior with the given standard normal noise (latent shape)."""
        return self.latents(self.moments(images), noise)

    @torch.no_grad()
    def moments(self, images: Tensor) -> Tensor:
        """Mean and log-variance of the raw latents, fp32 (B, 2c, h, w)."""
        self.vae.to(images.device)
        parts = []
        for part in images.split(AT_ONCE):
            posterior = self.vae.encode(part.float()).latent_dist
            parts.append(torch.cat([posterior.mean, posterior.logvar], dim=1))
        moments = torch.cat(parts)
        if not moments.isfinite().all():
            raise UserError("the autoencoder returned non-finite latents; check its weights")
        return moments

    def latents(self, moments: Tensor, noise: Tensor) -> Tensor:
        """Normalised latents (B, c, h, w) of moments that may come from a cache."""
        return draw_latents(moments, noise, self.normalisation)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        self.vae.to(latents.device)
        parts = self.normalisation.undo(latents.float()).split(AT_ONCE)
        return torch.cat([self.vae.decode(part).sample for part in parts])


def _digest(vae: torch.nn.Module) -> str:
    """SHA-256 of the weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(vae.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
