"""Opening a run folder: a new one, or one that goes on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from sit_vit5.codecs import Codec, configured_codec
from sit_vit5.codecs.cached import RecordedCodec
from sit_vit5.config import CodecConfig, TrainConfig
from sit_vit5.config.parse import differences, dump_config
from sit_vit5.config.presets import FP32, activation_bytes, weight_count
from sit_vit5.data import Source, same_data
from sit_vit5.data.latent_cache import LatentCache
from sit_vit5.models.checkpoint import LEFT_BY_A_KILL, Checkpoint
from sit_vit5.report.run_page import STARTS
from sit_vit5.training.logging import read_rows
from sit_vit5.utils.distributed import BatchPlan, launcher_shards
from sit_vit5.utils.errors import UserError, listed, nearest_multiples
from sit_vit5.utils.files import write_text
from sit_vit5.utils.memory import check_memory
from sit_vit5.utils.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    EVALUATIONS_FILE,
    EVENTS_FILE,
    LATEST_FILE,
    LOSS_PLOT,
    METRICS_FILE,
    PAGE_FILE,
    SAMPLES,
    SNAPSHOTS,
    checkpoint_steps,
    latest_name,
    run_of,
    step_name,
)

if TYPE_CHECKING:
    import torch


# Files that a new run replaces, in the run folder.
REPLACED = (
    CONFIG_FILE, METRICS_FILE, EVALUATIONS_FILE, PAGE_FILE, LOSS_PLOT, LATEST_FILE,
    f"{SAMPLES}/step_*.png", f"{CHECKPOINTS}/*", f"{SNAPSHOTS}/*",
)  # fmt: skip

# A run is these values: others start a new run with --init-from. The codec's path may change, its
# identity may not.
FIXED_ON_RESUME = (
    "backbone", "codec.name", "objective", "optimizer.name", "ema.decays", "ema.warmup",
    "ema.widths", "ema.snapshot_every", "seed", "name", "output_dir", "init_from",
)  # fmt: skip


def run_folder(config: TrainConfig, resume: Checkpoint | None) -> Path:
    """The run's folder: where the checkpoint lies, or output_dir/name."""
    if resume is not None:
        return run_of(resume.folder)
    source = config.data.source or Path(config.data.path or "data").name
    return Path(config.output_dir) / (config.name or f"{config.model.replace('/', '-')}-{source}")


def check_new(run: Path) -> None:
    """Refuses a folder with files that a new run would replace.

    A run that died before its first checkpoint leaves none.
    """
    if steps := list(checkpoint_steps(run)):
        raise UserError(
            f"{run} holds another run, at step {steps[-1]}; continue it with --resume {run}, "
            "choose another --name, or remove the folder"
        )
    held = [
        path.relative_to(run)
        for pattern in REPLACED
        for path in sorted(run.glob(pattern))
        if not (path.is_file() and path.stat().st_size == 0)
    ]
    if held := [path for path in held if not LEFT_BY_A_KILL.fullmatch(path.name)]:
        raise UserError(
            f"{run} has no checkpoint to continue from, but holds {listed(map(str, held), most=3)} "
            "of another run; choose another --name, or move the folder away"
        )


def check_resume(
    run: Path, resume: Checkpoint, config: TrainConfig, source: Source, codec: Codec
) -> None:
    """Refuses another model, objective, codec or data set, and a rewind over newer checkpoints."""
    if run == resume.folder:
        raise UserError(
            f"{run} is a checkpoint outside a run folder; start a new run with --init-from {run}"
        )
    if not resume.resumable:
        raise UserError(
            f"{resume.folder} holds averages only, the weights and the optimizer are gone; resume "
            f"the run folder {run}, or start a new run with --init-from {resume.folder}"
        )
    resume.check_resumable()
    fixed = [
        change
        for change in differences(resume.config, config)
        if change.startswith(FIXED_ON_RESUME)
    ]
    if fixed:
        raise UserError(
            f"--resume continues the same run, but {'; '.join(fixed)}; "
            "start a new run with --init-from to change this"
        )
    if resume.state.codec != codec.identity:
        raise UserError(
            f"--resume found the codec {codec.identity}, the run was trained with "
            f"{resume.state.codec}; give that one with --codec.path"
        )
    if (
        not same_data(resume.state.data, source.identity)
        or resume.state.class_names != source.class_names
    ):
        raise UserError(
            f"--resume found other data than the run was trained on: {resume.state.data}, "
            f"now {source.identity}; start a new run with --init-from"
        )
    if config.steps < resume.state.step:
        raise UserError(
            f"steps {config.steps} is passed: the run is at step {resume.state.step}; give more "
            "with --steps"
        )
    check_newest(run, resume)


def check_newest(run: Path, resume: Checkpoint) -> None:
    """Refuses a rewind over newer checkpoints."""
    newest = max(checkpoint_steps(run), default=resume.state.step)
    if newest > resume.state.step and resume.folder.name != latest_name(run):
        raise UserError(
            f"{resume.folder} is not the newest checkpoint of its run ({step_name(newest)}); "
            "resume the run folder (if you did, another process trains it), or branch off with "
            "--init-from"
        )


def is_evaluated(run: Path, step: int) -> bool:
    """True if evaluations.jsonl has a row of a step."""
    return any(row["step"] == step for row in read_rows(run / EVALUATIONS_FILE))


def has_ended(run: Path) -> bool:
    """True if the last session in a run folder drew its last step's figures."""
    kinds = [row["kind"] for row in read_rows(run / EVENTS_FILE)]
    telling = [kind for kind in kinds if kind in (*STARTS, "interrupted", "failed", "done")]
    return telling[-1:] == ["done"]


def remove_partials(run: Path) -> None:
    """Removes files that a kill left half-written."""
    for pattern in REPLACED:
        for partial in run.glob(f"{pattern}.partial"):
            if partial.is_file():
                partial.unlink(missing_ok=True)


def changes(resume: Checkpoint, config: TrainConfig) -> list[str]:
    """Changes of a resumed run, and their consequences."""
    lines = [f"changed on resume: {change}" for change in differences(resume.config, config)]
    if resume.holds_gammas_of_a_sum:
        lines.append(
            "note: layer_scale sum is read as none, which it was under another name: gamma is in "
            "the gate's bias, outputs are the same, and the optimizer's state of gamma is dropped"
        )
    before, now = resume.config.batch_size, config.batch_size
    if before != now:
        position = resume.state.step + resume.state.data_offset
        what = "passed over until the next epoch" if now > before else "seen again"
        lines.append(
            f"note: the data order is a function of step and batch_size; it goes on at image "
            f"{position * now:,} instead of {position * before:,}, those between are {what}"
        )
    return lines


def parallel(config: TrainConfig) -> str:
    """ddp or fsdp2, as configured or else as the launcher says; refuses two different words."""
    launched = "fsdp2" if launcher_shards() else None
    if config.parallel == "ddp" and launched == "fsdp2":
        raise UserError(
            "accelerate launch asks for FSDP, the configuration says parallel ddp; drop one of them"
        )
    found = config.parallel or launched or "ddp"
    if found == "fsdp2" and config.ema.device == "host":
        raise UserError(
            "ema.device host has no use with parallel fsdp2, which keeps only a part of the "
            "averages on each device; drop it"
        )
    return found


def open_codec(config: CodecConfig, source: Source | LatentCache) -> Codec | RecordedCodec:
    """The codec that the configuration names; for a latent cache, what it records of its own."""
    if source.kind == "images":
        return configured_codec(config)
    recorded = RecordedCodec.read(source.codec, channels=source.item_shape[0])
    if recorded.name != config.name:
        raise UserError(
            f"latent cache {source.root} was encoded with codec.name {recorded.name}, the "
            f"configuration says {config.name}; use --codec.name {recorded.name}, or encode again"
        )
    return recorded.normalised_by(config)


def latent_shape(
    config: TrainConfig, source: Source, codec: Codec | RecordedCodec
) -> tuple[int, int, int]:
    """(c, h, w) that the network sees. Refuses images whose latents do not split into patches."""
    if source.kind == "moments":
        return source.item_shape
    check_image_size(config.data.image_size, codec.factor, config.backbone.patch_size)
    return codec.latent_shape(source.item_shape)


def check_image_size(size: int, factor: int, patch_size: int) -> None:
    """Refuses a size whose latents do not split into patches; names the nearest that do."""
    multiple = factor * patch_size
    if size % multiple:
        raise UserError(
            f"data.image_size {size} is not divisible by {multiple} (codec factor {factor} x patch "
            f"{patch_size}); use {nearest_multiples(size, multiple)}"
        )


def write_config(run: Path, config: TrainConfig) -> None:
    """Saves the resolved configuration in the run folder."""
    write_text(run / CONFIG_FILE, dump_config(config))


def check_memory_of_run(
    config: TrainConfig,
    source: Source,
    latent_shape: tuple[int, int, int],
    plan: BatchPlan,
    device: torch.device,
) -> None:
    """Refuses a network or a batch that cannot fit, by lower bounds, before they are made."""
    backbone, parts = config.backbone, plan.processes if parallel(config) == "fsdp2" else 1
    copies = 4 + (len(config.ema.names) if config.ema.device == "model" else 0)
    check_memory(
        FP32 * copies * weight_count(backbone) // parts,
        f"a network of backbone.width {backbone.width} and backbone.depth {backbone.depth}",
        use="lower them",
        device=device,
    )
    batch = f"batch_size {plan.batch_size}, {plan.micro_batch_size} images at a time,"
    use = "lower it, or raise accumulation"
    check_memory(
        plan.micro_batch_size * math.prod(source.item_shape) * FP32, f"the data of {batch}", use=use
    )
    activations = plan.micro_batch_size * activation_bytes(backbone, latent_shape[1:])
    check_memory(activations, f"a forward pass of {batch}", use=use, device=device)
