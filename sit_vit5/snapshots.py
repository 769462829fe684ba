"""Snapshots of a run's power-function averages, of which other averages are made.

    runs/NAME/ema_snapshots/step_0001000_width_0.05.safetensors

Each is whole or absent, and none is ever removed.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sit_vit5.errors import UserError
from sit_vit5.files import replacing
from sit_vit5.models.state_dict import check_tensors
from sit_vit5.power_average import Profile
from sit_vit5.run_folder import SNAPSHOTS, step_name

# Half of fp32's disk. Rounding puts averages made of snapshots 2e-4 (relative) off, bf16 1.5e-3;
# widths 0.1 and 0.13 are 1.8e-2 apart (digits, one block, 16 snapshots of widths 0.05 and 0.1).
DTYPE = torch.float16
_FILE = re.compile(r"step_(\d+)_width_(0\.\d+|\d\.?\d*e-\d+)\.safetensors")


def write_snapshots(run: Path, step: int, averages: dict[float, dict[str, Tensor]]) -> None:
    """Writes the averages, given by relative width, after `step` steps; replaces older ones."""
    folder = run / SNAPSHOTS
    try:
        folder.mkdir(exist_ok=True)
        for width, average in averages.items():
            path = folder / f"{step_name(step)}_width_{width}.safetensors"
            with replacing(path) as partial:
                save_file({name: _stored(tensor) for name, tensor in average.items()}, partial)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot write the snapshot of step {step} to {folder}: {error}; free disk space, then "
            f"continue with --resume {run}"
        ) from None


def find_snapshots(run: Path) -> dict[Profile, Path]:
    """The snapshots of a run, by step."""
    found = {}
    for path in (run / SNAPSHOTS).glob("step_*.safetensors"):
        if match := _FILE.fullmatch(path.name):
            found[Profile(int(match[1]), float(match[2]))] = path
    return dict(sorted(found.items(), key=lambda item: (item[0].step, item[0].width)))


def weighted_sum(parts: dict[Path, float], model: Path) -> dict[str, Tensor]:
    """Sum of coefficient times snapshot, fp32; of tensors that are not floats, the last.

    model: safetensors file of the same network. Read one tensor at a time: beyond the sum itself,
    memory holds one tensor. Snapshots without weight are not read.
    """
    expected = _header(model)
    parts = {path: coefficient for path, coefficient in parts.items() if coefficient}
    for path in parts:
        check_tensors(_header(path), expected, path)
    total = {
        name: torch.zeros(tensor.shape, dtype=torch.float32) for name, tensor in expected.items()
    }
    for path, coefficient in parts.items():
        with safe_open(path, framework="pt") as file:
            for name in total:
                tensor = file.get_tensor(name)
                if tensor.is_floating_point():
                    total[name].add_(tensor.float(), alpha=coefficient)
                else:
                    total[name] = tensor
    return total


def _stored(tensor: Tensor) -> Tensor:
    return (tensor.to(DTYPE) if tensor.is_floating_point() else tensor).contiguous()


def _header(path: Path) -> dict[str, Tensor]:
    """Names and shapes in a safetensors file, as tensors without values."""
    try:
        with safe_open(path, framework="pt") as file:
            return {
                name: torch.empty(file.get_slice(name).get_shape(), device="meta")
                for name in file.keys()
            }
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} is missing or truncated ({error}); remove it and run the command again"
        ) from None
