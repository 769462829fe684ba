"""Train, sample and evaluate ViT-5 as the backbone of SiT. Importing has no effect.

The public names below are imported where they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "SiTPipeline": "interop.pipeline",
    "ViT5Classifier": "models.classifier",
    "frechet_distance": "metrics.fid",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
