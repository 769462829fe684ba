"""An autoencoder of diffusers as a codec, with the scale and shift of its configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sit_vit5.codecs import loading
from sit_vit5.codecs.normalisation import Normalisation, draw_latents
from sit_vit5.errors import UserError, choose

if TYPE_CHECKING:
    from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderTiny

# Images per call: at 256 pixels a larger batch takes tens of gigabytes and is no faster.
AT_ONCE = 16


class NonFiniteLatents(UserError):
    """rows: which images of the batch the encoder turned into infinities or NaN."""

    def __init__(self, rows: list[int]):
        super().__init__(
            f"the autoencoder returned non-finite latents for the images {rows} of the batch; "
            "check them and its weights"
        )
        self.rows = rows


class AutoencoderCodec:
    """Runs in fp32 (fp16 encoders return NaN, row D10), as many images at once as fit."""

    def __init__(
        self, vae: AutoencoderKL | AutoencoderTiny | AutoencoderDC, origin: dict | None = None
    ):
        self.origin = origin or {}
        self.vae = vae.float().eval().requires_grad_(False)
        self.kind = choose("autoencoder class", type(vae).__name__, loading.KINDS)
        self.draws_noise = self.kind.draws_noise
        self.factor = self.kind.factor(vae.config)
        self.normalisation = Normalisation.of_autoencoder(vae.config)
        self.at_once = AT_ONCE

    @classmethod
    def load(
        cls,
        name: str,
        path: str | None,
        *,
        local_only: bool = False,
        scale: float | None = None,
        shift: float | None = None,
    ) -> AutoencoderCodec:
        """The codec called `name`; see `loading.find`.

        scale, shift: instead of those of its configuration, in which they are put down: an export
        of the codec has them too.
        """
        found = loading.find(name, path, local_only=local_only)
        vae = found.load(local_only=local_only)
        shifts = "shift_factor" in vae.config and vae.config.get("latents_mean") is None
        if shift is not None and not shifts:
            raise UserError(
                f"codec.shift {shift} has no effect: the autoencoder {found.source!r} has no "
                "shift_factor, or shifts every channel by its own latents_mean; drop it"
            )
        factors = {"scaling_factor": scale, "shift_factor": shift}
        vae.register_to_config(**{key: x for key, x in factors.items() if x is not None})
        return cls(vae, found.origin)

    @cached_property
    def identity(self) -> dict:
        """What tells this autoencoder from another (row D8)."""
        digest = {"sha256": _digest(self.vae)}
        return {"name": self.kind.name} | self.normalisation.record() | digest

    def latent_shape(self, image_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """(C, H, W) of an image to (c, h, w) of its latents; UserError if it is not for these C."""
        channels, height, width = image_shape
        if channels != self.vae.config.in_channels:
            raise UserError(
                f"the autoencoder encodes images of {self.vae.config.in_channels} channels, these "
                f"have {channels}; use --codec.name identity or other images"
            )
        return self.vae.config.latent_channels, height // self.factor, width // self.factor

    def image_shape(self, latent_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """(c, h, w) of latents to (H, W, C) of the decoded image."""
        _, height, width = latent_shape
        return height * self.factor, width * self.factor, self.vae.config.in_channels

    def encode(self, images: Tensor, noise: Tensor | None) -> Tensor:
        """A draw of the posterior with the given standard normal noise (latent shape)."""
        return self.latents(self.moments(images), noise)

    @torch.no_grad()
    def moments(self, images: Tensor) -> Tensor:
        """Raw latents, fp32 (B, c, h, w), or their means and log-variances (B, 2c, h, w)."""
        self.vae.to(images.device)
        moments = self._in_parts(
            lambda part: self.kind.moments(self.vae.encode(part)),
            images.float(),
            sides=images.shape[2:],
        )
        finite = moments.isfinite().flatten(1).all(dim=1)
        if not finite.all():
            raise NonFiniteLatents((~finite).nonzero().flatten().tolist())
        return moments

    def latents(self, moments: Tensor, noise: Tensor | None) -> Tensor:
        """Normalised latents (B, c, h, w) of moments that may come from a cache."""
        return draw_latents(moments, noise if self.draws_noise else None, self.normalisation)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images (B, C, H, W), which may leave [-1, 1] a little."""
        self.vae.to(latents.device)
        return self._in_parts(
            lambda part: self.vae.decode(part).sample,
            self.normalisation.undo(latents.float()),
            sides=self.image_shape(latents.shape[1:])[:2],
        )

    def _in_parts(
        self, run: Callable[[Tensor], Tensor], batch: Tensor, *, sides: tuple[int, int]
    ) -> Tensor:
        """`run` on parts of the batch that fit in memory; the size that did is remembered.

        sides: of the images, in pixels.
        """
        parts, start = [], 0
        while start < len(batch):
            part = batch[start : start + self.at_once]
            result = _unless_out_of_memory(run, part)
            if result is not None:
                parts.append(result)
                start += len(part)
            elif len(part) == 1:
                raise UserError(
                    f"a single image of {sides[0]} x {sides[1]} pixels does not fit in what the "
                    f"autoencoder finds free on {batch.device}; stop other programs there, use a "
                    "smaller batch_size or smaller images"
                )
            else:
                self.at_once = len(part) // 2
        return torch.cat(parts)


def _unless_out_of_memory(run: Callable[[Tensor], Tensor], part: Tensor) -> Tensor | None:
    """None: it did not fit. Nothing of the failed call is kept: the error holds its tensors."""
    try:
        return run(part)
    except torch.OutOfMemoryError:
        return None


def _digest(vae: torch.nn.Module) -> str:
    """SHA-256 of the weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(vae.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
