"""Shared fixtures: tiny configurations, tiny image folders, commands as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).parents[1]

TINY = ("--config", "tests/tiny.yaml")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden",
        default=str(Path(__file__).parent / "golden"),
        help="folder of golden fixtures for tests/parity",
    )


@pytest.fixture(autouse=True, scope="session")
def _two_threads_at_most() -> None:
    """Two pytest workers on two cores: more threads only wait for one another."""
    torch.set_num_threads(1)


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess]:
    """Runs a script of the project in its own process and returns what a user sees."""

    def run(
        script: str, *arguments: object, processes: int = 1, check: bool = True
    ) -> subprocess.CompletedProcess:
        finished = subprocess.run(
            command_line(script, *arguments, processes=processes),
            cwd=ROOT,
            env=command_environment(),
            capture_output=True,
            text=True,
            timeout=180,
            stdin=subprocess.DEVNULL,
        )
        if check:
            assert finished.returncode == 0, finished.stderr[-3000:]
        return finished

    return run


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


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Two classes of twelve 20x16 PNGs of noise."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(0, 256, (20, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    return tmp_path / "data"
