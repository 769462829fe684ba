"""How tests run the project's commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from sit_vit5.checkpoint import open_checkpoint

ROOT = Path(__file__).parents[1]

# One block of 16 channels: a command with it spends its time on imports.
TINY = ("--config", "tests/tiny.yaml")


def command_line(script: str, *arguments: object, processes: int = 1) -> list[str]:
    """The command that runs a script on one process, or on several under torchrun."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return [*launcher, script, *map(str, arguments)]


def command_environment() -> dict[str, str]:
    """One thread per process, so that two pytest workers share two cores."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def final_tensors(run: Path) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint: weights, averages, optimizer."""
    folder = open_checkpoint(run).folder
    return {
        f"{file.stem}/{name}": tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Equal to the bit, by name."""
    assert first.keys() == second.keys()
    assert [name for name in first if not (first[name] == second[name]).all()] == []


def golden_weights(name: str) -> dict[str, Tensor]:
    """The parameters of a golden fixture under their official names."""
    tensors = load_file(ROOT / "tests" / "golden" / f"{name}.safetensors")
    return {k.removeprefix("param."): t for k, t in tensors.items() if k.startswith("param.")}
