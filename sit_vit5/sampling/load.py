"""What every sampling command starts from: a checkpoint's network, codec and settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sit_vit5.checkpoint import Checkpoint, open_checkpoint
from sit_vit5.codecs import Codec, build_codec
from sit_vit5.config import SamplerConfig
from sit_vit5.errors import UserError
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.precision import set_tf32
from sit_vit5.sampling.generator import Settings
from sit_vit5.sampling.guidance import guidance_scale_or_default


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
    checkpoint = open_checkpoint(options.checkpoint)
    settings = Settings(
        method=options.method,
        steps=options.steps,
        guidance_scale=guidance_scale_or_default(
            options.guidance_scale,
            class_names=checkpoint.state.class_names,
            class_dropout=checkpoint.config.objective.class_dropout,
        ),
        precision=options.precision,
        attention=options.attention,
        seed=options.seed,
    )
    trained = checkpoint.config.codec
    codec = build_codec(trained.name, options.codec_path or trained.path)
    if codec.identity != checkpoint.state.codec:
        raise UserError(
            f"the codec {codec.identity} is not the one of training, {checkpoint.state.codec}; "
            "give that one with --codec-path"
        )
    model = checkpoint.denoiser(options.weights).to(device).eval().requires_grad_(False)
    return Loaded(checkpoint, model, codec, settings)
