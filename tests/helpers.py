"""How tests run the project's commands and read its pages."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from sit_vit5.config.presets import RECIPES, Backbone
from sit_vit5.flow.interpolants import INTERPOLANTS, Coefficients
from sit_vit5.models.checkpoint import open_checkpoint
from sit_vit5.models.denoiser import Denoiser

ROOT = Path(__file__).parents[1]

# One block of 16 channels: a command with it spends its time on imports.
TINY = ("--config", "tests/tiny.yaml")


def command_line(script: str, *arguments: object, processes: int = 1) -> list[str]:
    """The line that runs a script, or a command by name; under torchrun on several processes."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    module = [] if script.endswith(".py") else ["-m", "sit_vit5"]
    return [*launcher, *module, script, *map(str, arguments)]


def command_environment() -> dict[str, str]:
    """One thread per process, so that two pytest workers share two cores."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def run_here(script: str, *arguments: object) -> None:
    """A script or command in this process: where starting another costs more than its work."""
    if script.endswith(".py"):
        main = runpy.run_path(str(ROOT / script))["main"]
    else:
        main = import_module(f"sit_vit5.commands.{script.replace('-', '_')}").main
    main([*map(str, arguments)])


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


def tiny_denoiser(num_classes: int = 3, seed: int = 0) -> Denoiser:
    """One block of 16 channels on 1x4x6 latents, with weights that make every path matter."""
    torch.manual_seed(seed)
    backbone = Backbone(16, 1, 2, patch_size=2, recipe=RECIPES["ViT5"])
    model = Denoiser(backbone, in_channels=1, input_size=(4, 6), num_classes=num_classes)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    return model.eval().requires_grad_(False)


class Gauss:
    """Data N(mu, s^2) per element on a path: what a perfect network predicts, in closed form."""

    def __init__(self, interpolant: str, mu: float = 0.5, s: float = 0.6):
        self.interpolant, self.mu, self.s = interpolant, mu, s

    def path(self, t: Tensor) -> Coefficients:
        return INTERPOLANTS[self.interpolant](t.reshape(-1, 1))

    def mean(self, t: Tensor) -> Tensor:
        return self.path(t).alpha_t * self.mu

    def variance(self, t: Tensor) -> Tensor:
        path = self.path(t)
        return path.alpha_t**2 * self.s**2 + path.sigma_t**2

    def sample(self, t: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(len(t), 1, generator=generator)
        return self.mean(t) + self.variance(t) ** 0.5 * noise

    def output(self, prediction: str, x_t: Tensor, t: Tensor) -> Tensor:
        """x_t: (B, D); t: (B,)."""
        path, deviation = self.path(t), (x_t - self.mean(t)) / self.variance(t)
        data = self.mu + path.alpha_t * self.s**2 * deviation
        return {
            "data": data,
            "noise": path.sigma_t * deviation,
            "score": -deviation,
            "velocity": path.d_alpha_t * data + path.sigma_d_sigma_t * deviation,
        }[prediction]


VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Checks that tags close in order; collects what is asked for."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.text, self.attributes, self.tags = [], "", [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def links(self) -> list[str]:
        return [value for name, value in self.attributes if name in ("src", "href")]


BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


def screenshot(page: Path, folder: Path, *, width: int, height: int = 1000) -> np.ndarray:
    """What a browser shows of a page, RGB (height, width, 3); its files go to the folder."""
    picture = folder / "page.png"
    subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}",
            f"--screenshot={picture}", page.as_uri(),
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return np.asarray(Image.open(picture).convert("RGB")).astype(int)
