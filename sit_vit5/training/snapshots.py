"""Snapshots of a run's power-function averages, of which other averages are made.

    runs/NAME/ema_snapshots/step_0001000_width_0.05.safetensors

Each is whole or absent, and none is ever removed.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from sit_vit5.config.recipes import Recipe
from sit_vit5.config.training import NARROWEST, WIDEST
from sit_vit5.models.state_dict import check_tensors, fold_gammas
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import replacing
from sit_vit5.utils.power_ema import Profile
from sit_vit5.utils.run_folder import SNAPSHOTS, step_name
from sit_vit5.utils.tensors import check_values, read_shapes, write_tensors

# Half of fp32's disk. Rounding puts averages made of snapshots 2e-4 (relative) off, bf16 1.5e-3;
# widths 0.1 and 0.13 are 1.8e-2 apart (digits, one block, 16 snapshots of widths 0.05 and 0.1).
DTYPE = torch.float16
TYPES = (DTYPE, torch.float32)
REMEDY = "remove it and run the command again"
_FILE = re.compile(r"step_(\d+)_width_(0\.\d+|\d\.?\d*e-\d+)\.safetensors")


def write_snapshots(run: Path, step: int, averages: dict[float, dict[str, Tensor]]) -> None:
    """Writes the averages, given by relative width, after `step` steps; replaces older ones."""
    folder = run / SNAPSHOTS
    try:
        folder.mkdir(exist_ok=True)
        for width, average in averages.items():
            path = folder / f"{step_name(step)}_width_{width}.safetensors"
            with replacing(path) as partial:
                write_tensors(partial, {name: _stored(t) for name, t in average.items()})
    except OSError as error:
        raise UserError(
            f"cannot write the snapshot of step {step} to {folder}: {error}; free disk space, then "
            f"continue with --resume {run}"
        ) from None


def find_snapshots(run: Path) -> dict[Profile, Path]:
    """The snapshots of a run, by step; files whose names no snapshot has are ignored."""
    found = {}
    for path in (run / SNAPSHOTS).glob("step_*.safetensors"):
        match = _FILE.fullmatch(path.name)
        profile = Profile(int(match[1]), float(match[2])) if match else None
        if profile and profile.step > 0 and NARROWEST <= profile.width < WIDEST:
            found[profile] = path
    return dict(sorted(found.items(), key=lambda item: (item[0].step, item[0].width)))


def weighted_sum(parts: dict[Path, float], model: Path, recipe: Recipe) -> dict[str, Tensor]:
    """Sum of coefficient times snapshot, fp32.

    model: safetensors file of the same network, of the recipe. Read one tensor at a time: beyond
    the sum itself, memory holds one tensor. Snapshots without weight are not read.
    """
    expected = fold_gammas(read_shapes(model, remedy=REMEDY), recipe)
    headers = {
        path: read_shapes(path, remedy=REMEDY) for path, coefficient in parts.items() if coefficient
    }
    for path, header in headers.items():
        check_tensors(fold_gammas(header, recipe), expected, path)
    total = {
        name: torch.zeros(tensor.shape, dtype=torch.float32)
        for header in headers.values()
        for name, tensor in header.items()
    }
    for path, header in headers.items():
        with safe_open(path, framework="pt") as file:
            for name in header:
                part = check_values(
                    {name: file.get_tensor(name)}, path, dtypes=TYPES, remedy=REMEDY
                )
                total[name].add_(part[name].float(), alpha=parts[path])
    total = fold_gammas(total, recipe)  # a sum of folded snapshots is the folded sum
    return check_values(total, "the combination of snapshots", remedy="choose another --width")


def _stored(tensor: Tensor) -> Tensor:
    """In half precision; in fp32 where a number is beyond its range."""
    half = tensor.to(DTYPE)
    return half if half.isfinite().all() else tensor.float()
