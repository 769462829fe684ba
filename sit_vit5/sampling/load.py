"""What every sampling command starts from: a checkpoint's network, codec and settings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from sit_vit5.checkpoint import Checkpoint, open_checkpoint
from sit_vit5.codecs import Codec, build_codec
from sit_vit5.config import SamplerConfig
from sit_vit5.errors import UserError
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.precision import set_tf32
from sit_vit5.sampling.generator import Settings


@dataclass(frozen=True)
class Loaded:
    """Ready to sample."""

    checkpoint: Checkpoint
    model: Denoiser
    codec: Codec
    settings: Settings

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names by label; empty for an unconditional model."""
        return self.checkpoint.state.class_names


def load(options: SamplerConfig, device: torch.device) -> Loaded:
    """Opens the checkpoint, checks that the codec is the one of training, builds the network."""
    set_tf32(False)
    settings = Settings(
        method=options.method,
        steps=options.steps,
        guidance_scale=options.guidance_scale,
        precision=options.precision,
        seed=options.seed,
    )
    checkpoint = open_checkpoint(options.checkpoint)
    trained = checkpoint.config.codec
    codec = build_codec(trained.name, options.codec_path or trained.path)
    if codec.identity != checkpoint.state.codec:
        raise UserError(
            f"the codec {codec.identity} is not the one of training, {checkpoint.state.codec}; "
            "give that one with --codec-path"
        )
    model = checkpoint.denoiser(options.weights).to(device).eval().requires_grad_(False)
    return Loaded(checkpoint, model, codec, settings)


def file_hash(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()
