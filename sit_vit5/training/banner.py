"""What a run says before its first step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sit_vit5.cli import dump_config
from sit_vit5.codecs.normalisation import USUAL_STD
from sit_vit5.config import TrainConfig
from sit_vit5.presets import title
from sit_vit5.snapshots import snapshot_bytes
from sit_vit5.training.learner import compiles

if TYPE_CHECKING:
    from sit_vit5.training.trainer import Trainer

NO_DECODER = (
    "note: no grids are drawn, since the autoencoder of the latent cache is not on this machine; "
    "give it with --codec.path, or a tiny decoder with --preview.decoder"
)


def banner(trainer: Trainer) -> list[str]:
    """The resolved configuration and the facts that follow from it."""
    config, plan, source = trainer.config, trainer.plan, trainer.source
    parameters = sum(p.numel() for p in trainer.learner.model.parameters())
    shape = " x ".join(map(str, trainer.latent_shape))
    classes = _class_list(source.class_names)
    return [
        dump_config(config).rstrip(),
        "",
        f"run: {trainer.run_folder}, from step {trainer.step} to {config.steps}",
        f"model: {title(config.model, config.backbone)}, {parameters:,} parameters, input {shape}",
        f"data: {len(source):,} images, {classes}",
        f"batch: {plan.micro_batch_size} per forward pass x {plan.processes} processes x "
        f"{plan.accumulation} accumulation steps = {config.batch_size} images per step, "
        f"{math.ceil(len(source) / config.batch_size):,} steps per epoch",
        f"precision: {config.precision} matrix products, TF32 off, "
        f"{'compiled' if compiles(config, trainer.device) else 'eager'} blocks"
        f"{', recomputed in the backward pass' if config.recompute else ''}, "
        f"{config.attention} attention, torch {torch.__version__} on "
        f"{trainer.device}",
        *_snapshots(config, parameters),
    ]


def check_first_latents(latents: Tensor) -> list[str]:
    """A warning if the first latents are far from unit scale: a codec or cache is wrong (T28)."""
    std, (low, high) = latents.std().item(), USUAL_STD
    if low <= std <= high:
        return []
    return [
        f"warning: the first latents have standard deviation {std:.3f}, expected {low} to {high}; "
        "check the codec's scale and look at the data"
    ]


def _snapshots(config: TrainConfig, parameters: int) -> list[str]:
    every, size = config.ema.snapshot_every, snapshot_bytes(config.ema, config.steps, parameters)
    if not every:
        return []
    return [
        f"snapshots: {len(config.ema.widths)} averages every {every:,} steps, {size / 1e9:,.3g} GB "
        f"after {config.steps:,} steps, never removed"
    ]


def _class_list(names: tuple[str, ...]) -> str:
    if not names:
        return "unconditional"
    shown = ", ".join(f"{label} {name}" for label, name in enumerate(names[:5]))
    return f"{len(names)} classes ({shown}{', ...' if len(names) > 5 else ''})"
