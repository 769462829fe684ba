"""What every configuration refuses: empty texts, numbers out of range, words outside a choice."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from sit_vit5.errors import UserError, choose

# Smallest legal values; nothing here has a largest.
_AT_LEAST = {
    "step": 0,
    "heads": 1,
    "steps": 1,
    "batch_size": 1,
    "accumulation": 1,
    "shard_size": 1,
    "sample": 1,
    "log_every": 1,
    "max_skipped": 1,
    "seed": 0,
    "data.image_size": 1,
    "data.workers": 0,
    "optimizer.lr": 0,
    "optimizer.eps": 0,
    "optimizer.weight_decay": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.clip_norm": 0,
    "objective.class_dropout": 0,
    "ema.snapshot_every": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 0,
    "checkpoint.milestone_every": 0,
    "watchdog.spike": 0,
    "watchdog.max_rewinds": 0,
    "watchdog.data_wait": 0,
    "watchdog.patience": 0.01,
    "preview.every": 0,
    "preview.columns": 1,
    "preview.classes": 1,
    "preview.steps": 1,
    "preview.guidance_scale": 0,
    "evaluation.every": 0,
    "evaluation.num_samples": 2,
    "evaluation.steps": 1,
    "evaluation.guidance_scale": 0,
    "evaluation.batch_size": 1,
    "columns": 1,
    "images": 1,
    "frames": 2,
    "seeds": 0,
    "head": 0,
    "image_size": 1,
    "num_samples": 1,
    "num_images": 0,
    "num_images_kept": 1,
    "report.images": 1,
    "real.workers": 0,
    "workers": 0,
    "probes": 1,
    "bootstrap": 0,
    "cache_gigabytes": 0,
    "scales": 0,
    "guidance.scale": 0,
    "guidance.channels": 1,
    "objective.shift": 1e-6,
    "objective.times_std": 0,
    "atol": 0,
    "rtol": 0,
    "shift": 1e-6,
    "eps": 0,
    "sde.norm": 0,
    "sde.last_step_size": 0,
}


def check_values(config: object, prefix: str = "") -> None:
    """Refuses empty texts, numbers not finite or below their smallest legal value, and, in what was
    not read by the command line's parser, words outside a choice."""
    hints = get_type_hints(type(config))
    for field in fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if get_origin(hints[field.name]) is Literal:
            choose(name, value, dict.fromkeys(get_args(hints[field.name])))
        if is_dataclass(value):
            check_values(value, f"{name}.")
        if value == "":  # an unset variable of the shell
            raise UserError(f"{name} needs a value")
        for number in value if isinstance(value, tuple) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"{name} {number} must be finite")
            if isinstance(number, (int, float)) and number < _AT_LEAST.get(name, -math.inf):
                raise UserError(f"{name} {number} must be at least {_AT_LEAST[name]}")
