"""On what a value was computed, for the record."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from sit_vit5 import __version__
from sit_vit5.metrics.device import default_device

# Whose versions a value can depend on.
LIBRARIES = ("numpy", "scipy", "torch", "torch-fidelity", "timm", "pillow")


def versions() -> dict[str, str]:
    """Of Python, this project and the libraries that a value can depend on."""
    found = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"sit_vit5": __version__, "python": platform.python_version(), **found}


def device_name() -> str:
    """What the features were computed on."""
    device = default_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
