"""Checkpoint folders: safetensors and JSON, complete or absent.

    step_0001000/model.safetensors  ema_0.9999.safetensors  ema_width_0.1.safetensors
                 optimizer.safetensors  config.yaml  state.json

Sampling needs this folder and nothing else (and the autoencoder, if the latents have one). Of an
old milestone only the averages are left: it is sampled, not resumed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from sit_vit5 import __version__
from sit_vit5.cli import dump_config, load_saved_config
from sit_vit5.config import CheckpointConfig, TrainConfig
from sit_vit5.errors import UserError
from sit_vit5.files import new_folder, sync, write_json, write_text
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.state_dict import fold_gammas, load_weights
from sit_vit5.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    LATEST_FILE,
    STATE_FILE,
    checkpoint_steps,
    find_checkpoint,
    last_good_checkpoint,
    step_name,
)
from sit_vit5.tensors import read_tensors, write_tensors

SCHEMA = 1
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
_LEFT_BY_A_KILL = re.compile(r"step_\d+\.(partial|replaced|pruned)")


@dataclass(frozen=True)
class State:
    """Everything about a checkpoint that is neither weights nor configuration.

    codec: what tells the codec from another, compared. codec_origin: where its weights came from,
    for people. out_channels and timesteps: an imported DiT's, see `Denoiser`.
    """

    step: int
    images_seen: int
    skipped_steps: int
    skipped_in_a_row: int
    in_channels: int
    input_size: tuple[int, int]
    class_names: tuple[str, ...]
    data: dict
    codec: dict
    codec_origin: dict = field(default_factory=dict)
    out_channels: int | None = None
    timesteps: int = 0
    data_offset: int = 0
    rewinds: int = 0
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
        """Whether it was written with `layer_scale sum`; see `fold_gammas`."""
        with safe_open(self.folder / self.weights_file("raw"), framework="pt") as file:
            gammas = any(name.endswith(".gamma") for name in file.keys())
        return gammas and self.config.backbone.recipe.layer_scale == "none"

    @property
    def resumable(self) -> bool:
        """Whether it still holds what training goes on from."""
        return (self.folder / OPTIMIZER_FILE).exists()

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
                f"{', '.join(present) or 'none'}; choose one with --weights"
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
            if _LEFT_BY_A_KILL.fullmatch(left.name):
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
    """Whether the averages of this step are kept for good."""
    return step > 0 and config.milestone_every > 0 and step % config.milestone_every == 0


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint behind a path (see `find_checkpoint`); its weights are checked when read."""
    folder = find_checkpoint(path)
    try:
        raw = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / STATE_FILE} cannot be read: {error}") from None
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        found = raw.get("schema") if isinstance(raw, dict) else None
        raise UserError(
            f"{folder} has checkpoint schema {found}, this version reads {SCHEMA}; "
            "use the version that wrote it"
        )
    try:
        state = _state(raw)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / STATE_FILE} is not a checkpoint's state: {error}") from None
    return Checkpoint(folder, load_saved_config(folder / CONFIG_FILE), state)


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


def _state(raw: dict) -> State:
    """The state with its types checked: JSON edited by hand must not surface as a traceback."""
    for key in ("step", "images_seen", "skipped_steps", "skipped_in_a_row", "in_channels"):
        if type(raw[key]) is not int or raw[key] < 0:
            raise ValueError(f"{key} {raw[key]!r} is not a count")
    size, names = raw["input_size"], raw["class_names"]
    if not (isinstance(size, list) and [type(side) for side in size] == [int, int]):
        raise ValueError(f"input_size {size!r} is not a height and a width")
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("class_names is not a list of names")
    norms = raw.get("grad_norms", [])
    if not (isinstance(norms, list) and all(isinstance(norm, float) for norm in norms)):
        raise ValueError("grad_norms is not a list of numbers")
    tuples = {"input_size": size, "class_names": names, "grad_norms": norms}
    return State(**raw | {key: tuple(value) for key, value in tuples.items()})


def _load(path: Path) -> dict[str, Tensor]:
    """Weights or optimizer state, all of it in fp32."""
    remedy = "use another checkpoint of the run"
    return read_tensors(path, dtypes=(torch.float32,), remedy=remedy)
