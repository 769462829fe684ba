"""Lines that a run prints before its first step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from sit_vit5.config.parse import dump_config
from sit_vit5.config.presets import title
from sit_vit5.training.disk import check_disk, run_disk
from sit_vit5.training.parallel import is_sharded
from sit_vit5.training.train_state import compiles

if TYPE_CHECKING:
    from sit_vit5.training.trainer import Trainer


NO_DECODER = (
    "note: no grids are drawn, since the autoencoder of the latent cache is not on this machine; "
    "give it with --codec.path, or a tiny decoder with --preview.decoder"
)


def banner(trainer: Trainer) -> list[str]:
    """The resolved configuration and the facts that follow from it."""
    config, plan, source = trainer.config, trainer.plan, trainer.source
    model = trainer.learner.model
    weights = list(model.parameters())
    parameters = sum(weight.numel() for weight in weights)
    trainable = sum(weight.numel() for weight in weights if weight.requires_grad)
    shape = " x ".join(map(str, trainer.latent_shape))
    classes = _class_list(source.class_names)
    return [
        dump_config(config).rstrip(),
        "",
        f"run: {trainer.run_folder}, from step {trainer.step} to {config.steps}",
        f"model: {title(config.model, config.backbone)}, {parameters:,} parameters, input {shape}",
        f"data: {len(source):,} images, {classes}",
        *source.notes,
        f"batch: {plan.micro_batch_size} per forward pass x {plan.processes} processes x "
        f"{plan.accumulation} accumulation steps = {config.batch_size} images per step, "
        f"{math.ceil(len(source) / config.batch_size):,} steps per epoch",
        f"precision: {config.precision} matrix products, "
        f"TF32 {'on' if config.precision == 'tf32' else 'off'}, "
        f"{'compiled' if compiles(config, trainer.device) else 'eager'} blocks"
        f"{', recomputed in the backward pass' if config.activation_checkpointing else ''}, "
        f"{config.attention} attention, torch {torch.__version__} on "
        f"{trainer.device}{', cut over the processes' if is_sharded(model) else ''}",
        *check_disk(trainer.run_folder, config, run_disk(config, parameters, trainable)),
    ]


def _class_list(names: tuple[str, ...]) -> str:
    if not names:
        return "unconditional"
    shown = ", ".join(f"{label} {name}" for label, name in enumerate(names[:5]))
    return f"{len(names)} classes ({shown}{', ...' if len(names) > 5 else ''})"
