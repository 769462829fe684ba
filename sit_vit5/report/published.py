"""Published values on ImageNet 256x256: the tables of published.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

# Of the published values: samples, and size of the images in pixels.
PUBLISHED_SAMPLES, IMAGE_SIZE = 50_000, 256
# Of sample/generate.py for values without guidance: the sampler and precision of SiT's code.
SAMPLER_FLAGS = "--method euler_maruyama --steps 250 --guidance.scale 1 --precision tf32"
EARLY = 400_000  # the step of figure 6 at which all models have a value


@dataclass(frozen=True)
class Published:
    """One value. guidance, labels (how they were drawn): in the source's words; score: Inception
    Score, None if not stated."""

    model: str
    training: str
    guidance: str
    fid: float
    source: str
    score: float | None = None
    labels: str = ""


@dataclass(frozen=True)
class Expected:
    """A value to be met within a tolerance."""

    value: float
    tolerance: float

    def met_by(self, value: float) -> bool:
        """Whether a value is within the tolerance."""
        return round(abs(value - self.value), 9) <= self.tolerance


@dataclass(frozen=True)
class Tables:
    """Everything that the file holds.

    curves: FID-50K without guidance by model name and training step, from curve_source. evaluator:
    metrics of ADM's sample set by their names in metrics.json; sampler: FID of SiT's weights.
    """

    values: tuple[Published, ...]
    curves: Mapping[str, Mapping[int, float]]
    curve_source: str
    curve_reading: str
    evaluator: Mapping[str, Expected]
    sampler: Expected


@cache
def published() -> Tables:
    """The tables of the file."""
    tree = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    curves, calibration = tree["curves"], tree["calibration"]
    return Tables(
        values=tuple(Published(**entry) for entry in tree["values"]),
        curves={
            model: {
                step: fid for step, fid in zip(curves["steps"], row, strict=True) if fid is not None
            }
            for model, row in curves["fid"].items()
        },
        curve_source=curves["source"],
        curve_reading=curves["reading"],
        evaluator={name: Expected(**entry) for name, entry in calibration["evaluator"].items()},
        sampler=Expected(**calibration["sampler"]),
    )


def paper_name(model: str) -> str:
    """A model's name as papers write it: ViT-5-XL/2 for ViT5-XL/2."""
    return model.replace("ViT5", "ViT-5", 1)


def rival(model: str) -> str | None:
    """The other backbone of the same size and patch in the curves: SiT-B/2 of ViT5-B/2."""
    recipe, _, size = model.partition("-")
    other = f"{'SiT' if recipe == 'ViT5' else 'ViT5'}-{size}"
    return other if other in published().curves else None
