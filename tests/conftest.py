"""Shared fixtures: tiny configurations, tiny image folders, commands as a user runs them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from autoencoders import random_autoencoder
from helpers import ROOT, command_environment, command_line
from inception import random_inception
from PIL import Image


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


@pytest.fixture(scope="session")
def tiny_vae(tmp_path_factory) -> Path:
    """An AutoencoderKL of random weights, 4 latent channels, factor 2, saved by diffusers."""
    folder = tmp_path_factory.mktemp("vae")
    random_autoencoder("scale").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def inception_file(tmp_path_factory) -> Path:
    """Random weights of torch-fidelity's InceptionV3."""
    return random_inception(tmp_path_factory.mktemp("inception") / "random.pth")
