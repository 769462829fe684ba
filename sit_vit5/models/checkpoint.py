"""Checkpoint folders: safetensors and JSON, complete or absent.

    step_0001000/model.safetensors  ema_0.9999.safetensors  ema_width_0.1.safetensors
                 optimizer.safetensors  config.yaml  state.json

Sampling needs this folder and nothing else (and the autoencoder, if the latents have one). Of an
old milestone only the averages are left: it is sampled, not resumed.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from sit_vit5 import __version__
from sit_vit5.config import CheckpointConfig, TrainConfig
from sit_vit5.config.parse import dump_config, load_saved_config
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.state_dict import fold_gammas, load_weights
from sit_vit5.utils.errors import UserError, brief, listed
from sit_vit5.utils.files import Count, Size, new_folder, read_json, sync, write_json, write_text
from sit_vit5.utils.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    LATEST_FILE,
    STATE_FILE,
    checkpoint_steps,
    find_checkpoint,
    last_good_checkpoint,
    run_of,
    step_name,
)
from sit_vit5.utils.tensors import read_shapes, read_tensors, write_tensors

SCHEMA = 1
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
LEFT_BY_A_KILL = re.compile(r"step_\d+\.(partial|replaced|pruned)")


@dataclass(frozen=True)
class State:
    """Everything about a checkpoint that is neither weights nor configuration.

    codec: what tells the codec from another, compared. codec_origin: where its weights came from,
    for people. out_channels and timesteps: an imported DiT's, see `Denoiser`. A file with other
    fields is refused: a later version gives them a meaning.
    """

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}

    step: Count
    images_seen: Count
    skipped_steps: Count
    skipped_in_a_row: Count
    in_channels: Size
    input_size: tuple[Size, Size]
    class_names: tuple[str, ...]
    data: dict
    codec: dict
    codec_origin: dict = field(default_factory=dict)
    out_channels: Size | None = None
    timesteps: Count = 0
    data_offset: Count = 0
    rewinds: Count = 0
    grad_norms: tuple[float, ...] = ()
    schema: int = SCHEMA
    versions: dict = field(
        default_factory=lambda: {"sit_vit5": __version__, "torch": torch.__version__}
    )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, its small files read."""

    folder: Path
    config: TrainConfig
    state: State

    def weights(self, name: str = "raw") -> dict[str, Tensor]:
        """Weights on the CPU: raw, ema (the slowest average), ema_DECAY or ema_width_WIDTH."""
        weights = _load(self.folder / self.weights_file(name))
        return fold_gammas(weights, self.config.backbone.recipe)

    def optimizer(self) -> dict[str, Tensor]:
        """The optimizer's state as named tensors."""
        return _load(self.folder / OPTIMIZER_FILE)

    @property
    def holds_gammas_of_a_sum(self) -> bool:
        """True if written with `layer_scale sum`; see `fold_gammas`."""
        path = self.folder / self.weights_file("raw")
        shapes = read_shapes(path, remedy=_remedy(self.folder, path.name))
        gammas = any(name.endswith(".gamma") for name in shapes)
        return gammas and self.config.backbone.recipe.layer_scale == "none"

    @property
    def resumable(self) -> bool:
        """True if training can resume from it."""
        return (self.folder / OPTIMIZER_FILE).exists()

    def check_resumable(self) -> None:
        """Refuses a checkpoint from which a file is missing that training continues from."""
        wanted = [MODEL_FILE, OPTIMIZER_FILE, *map(_average_file, self.config.ema.names)]
        if missing := [file for file in wanted if not (self.folder / file).exists()]:
            remedy = _remedy(self.folder, missing[0])
            raise UserError(f"{self.folder} lacks {listed(missing)}; {remedy}")

    def weights_file(self, name: str) -> str:
        """File of the weights called `name`."""
        return self.weights_files()[self.weights_name(name)]

    def weights_files(self) -> dict[str, str]:
        """Files of the weights that are there by their full names."""
        files = {"raw": MODEL_FILE}
        files |= {name: _average_file(name) for name in self.config.ema.names}
        # Imported weights may be averaged ones alone.
        return {name: file for name, file in files.items() if (self.folder / file).exists()}

    def weights_name(self, name: str) -> str:
        """The full name of the weights called `name`: ema is the slowest average."""
        full_name = self.config.ema.full_name(name)
        if full_name not in (present := self.weights_files()):
            raise UserError(
                f"weights {name!r} are not in {self.folder}, which has "
                f"{', '.join(present) or 'none'}; choose one of these or another checkpoint"
            )
        return full_name

    def denoiser(self, weights: str) -> Denoiser:
        """The network with the weights called `weights`."""
        with torch.device("meta"):  # no time for initial values that are replaced at once
            model = Denoiser(
                self.config.backbone,
                in_channels=self.state.in_channels,
                input_size=self.state.input_size,
                num_classes=len(self.state.class_names),
                out_channels=self.state.out_channels,
                timesteps=self.state.timesteps,
            )
        load_weights(model, self.weights(weights), self.folder, assign=True)
        return model


def save_checkpoint(
    run: Path,
    state: State,
    config: TrainConfig,
    *,
    model: dict[str, Tensor],
    averages: dict[str, dict[str, Tensor]],
    optimizer: dict[str, Tensor],
) -> Path:
    """Writes `step_N` in one step and points `latest` to it; on any error the old ones remain."""
    target = run / CHECKPOINTS / step_name(state.step)
    partial, replaced = (target.with_name(target.name + end) for end in (".partial", ".replaced"))
    files = {MODEL_FILE: model, OPTIMIZER_FILE: optimizer}
    files |= {_average_file(name): average for name, average in averages.items()}
    try:
        for left in (run / CHECKPOINTS).glob("step_*.*"):
            if LEFT_BY_A_KILL.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)
        _write_folder(partial, state, config, files)
        if target.exists():  # a kill came before the pointer was written: same run, same step
            os.replace(target, replaced)
        os.replace(partial, target)
        sync(target.parent)
        write_text(run / LATEST_FILE, f"{CHECKPOINTS}/{target.name}\n")
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        (run / (LATEST_FILE + ".partial")).unlink(missing_ok=True)
        last = last_good_checkpoint(run)
        go_on = "run the same command again" if last == "none" else f"continue with --resume {run}"
        raise UserError(
            f"cannot save the checkpoint of step {state.step}: {error}; last good checkpoint: "
            f"{last}; free disk space, then {go_on}"
        ) from None
    return target


def import_checkpoint(
    target: Path,
    state: State,
    config: TrainConfig,
    *,
    averages: dict[str, dict[str, Tensor]],
    model: dict[str, Tensor] | None,
) -> None:
    """Writes a checkpoint folder that stands alone: weights from elsewhere, no optimizer."""
    files = {} if model is None else {MODEL_FILE: model}
    files |= {_average_file(name): average for name, average in averages.items()}
    with new_folder(target) as partial:
        _write_folder(partial, state, config, files)


def prune_checkpoints(run: Path, config: CheckpointConfig, *, up_to: int) -> None:
    """Removes all but the newest checkpoints, by number; of milestones the averages stay.

    up_to: the step just saved; a newer folder, left by a kill, is neither counted nor removed.
    """
    steps = {step: folder for step, folder in checkpoint_steps(run).items() if step <= up_to}
    for step, folder in list(steps.items())[: -config.keep] if config.keep else []:
        # One that holds averages alone was a milestone before a resume changed the interval.
        if is_milestone(step, config) or not (folder / OPTIMIZER_FILE).exists():
            for file in (OPTIMIZER_FILE, MODEL_FILE):
                (folder / file).unlink(missing_ok=True)
        else:
            doomed = folder.with_name(folder.name + ".pruned")
            os.replace(folder, doomed)  # a half-removed folder must not look complete
            shutil.rmtree(doomed, ignore_errors=True)


def is_milestone(step: int, config: CheckpointConfig) -> bool:
    """True if the EMA weights of this step are never removed."""
    return step > 0 and config.milestone_every > 0 and step % config.milestone_every == 0


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint behind a path (see `find_checkpoint`); its weights are checked when read."""
    folder = find_checkpoint(path)
    file, remedy = folder / STATE_FILE, _remedy(folder, STATE_FILE)
    schema = read_json(file, remedy=remedy).get("schema")
    if schema != SCHEMA:
        raise UserError(
            f"{folder} has checkpoint schema {brief(schema)}, this version reads {SCHEMA}; "
            "use the version that wrote it"
        )
    state = read_json(file, State, remedy=remedy)
    try:
        config = load_saved_config(folder / CONFIG_FILE)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from None
    return Checkpoint(folder, config, state)


def _average_file(name: str) -> str:
    return f"{name}.safetensors"


def _write_folder(
    folder: Path, state: State, config: TrainConfig, files: dict[str, dict[str, Tensor]]
) -> None:
    """A new folder with everything on the disk; the caller renames it."""
    folder.mkdir(parents=True)
    for name, tensors in files.items():
        write_tensors(folder / name, tensors)
    write_text(folder / CONFIG_FILE, dump_config(config))
    write_json(folder / STATE_FILE, asdict(state))


def _remedy(folder: Path, file: str) -> str:
    """Advice for a damaged or missing file: the newest other checkpoint of the run that has it."""
    run, own = run_of(folder), folder.resolve()
    others = [other for other in checkpoint_steps(run).values() if other.resolve() != own]
    whole = [other for other in others if (other / file).is_file()]
    if not whole:
        return "no other checkpoint is there; copy it again or make it again"
    other = f"use another checkpoint of the run, such as {whole[-1]}"
    return f"{other} (to resume from it, first remove {folder})"


def _load(path: Path) -> dict[str, Tensor]:
    """Weights or optimizer state, all of it in fp32."""
    remedy = _remedy(path.parent, path.name)
    return read_tensors(path, dtypes=(torch.float32,), remedy=remedy)
