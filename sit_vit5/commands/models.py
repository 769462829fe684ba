"""Lists models with parameters and FLOPs: `python -m sit_vit5 models 'ViT5-*/2' SiT-XL`."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Annotated

from annotated_types import Ge, Le
from tyro.conf import Positional

from sit_vit5.config import presets
from sit_vit5.config.fields import ImageSize, check_values
from sit_vit5.config.parse import parse
from sit_vit5.utils.errors import UserError, nearest, nearest_multiples

# ViT-5's classifiers: recipe ViT5, patch 16, 224x224; weights of all but XL are released.
CLASSIFIERS = ("ViT5-S/16", "ViT5-B/16", "ViT5-L/16", "ViT5-XL/16")


@dataclass(frozen=True)
class ListConfig:
    """List models with their parameters and FLOPs."""

    names: Positional[tuple[str, ...]] = ()
    """Names or patterns such as 'ViT5-*/4' or SiT-XL, in quotes for the shell; without a patch: 2.
    None given: all models of patch 2, and ViT-5's classifiers."""
    image_size: ImageSize = 256
    """Side of the images in pixels."""
    latent_factor: Annotated[int, Ge(1), Le(1024)] = 8
    """Image pixels per latent pixel and side; 1 with --latent-channels 3: models of pixels."""
    latent_channels: Annotated[int, Ge(1), Le(2**16)] = 4
    """Channels of the latents."""
    num_classes: Annotated[int, Ge(0), Le(10**6)] = 1000
    """Classes of the denoisers; 0: unconditional."""
    json: bool = False
    """Print JSON instead of tables."""

    def __post_init__(self) -> None:
        check_values(self)
        if self.image_size % self.latent_factor:
            raise UserError(
                f"image_size {self.image_size} is not divisible by latent_factor "
                f"{self.latent_factor}; "
                f"use {nearest_multiples(self.image_size, self.latent_factor)}"
            )


@dataclass(frozen=True)
class Row:
    """One line of the list. flops: 2 x multiply-adds of one forward pass of one image."""

    model: str
    kind: str
    parameters: int
    flops: int


def main(argv: list[str]) -> None:
    """Parse, count, print."""
    options = parse(ListConfig, argv)
    warnings.simplefilter("ignore")  # a recipe that one should not train may still be counted
    denoisers = denoiser_rows(options)
    classifiers = [] if options.names else classifier_rows()
    if options.json:
        print(json.dumps([asdict(row) for row in denoisers + classifiers], indent=1))
    else:
        print(report(options, denoisers, classifiers))


def matching(patterns: tuple[str, ...]) -> list[str]:
    """The model names that match any pattern, each once, in the order of `model_names`."""
    patterns = tuple(p if "/" in p else f"{p}/2" for p in patterns)
    names = presets.model_names()
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"no model matches {pattern!r}; nearest: {nearest(pattern, names)}")
    return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]


def denoiser_rows(options: ListConfig) -> list[Row]:
    """The denoisers that are asked for."""
    names = matching(options.names or ("*",))  # first: a typo is answered without torch
    from sit_vit5.analysis.cost import denoiser_cost

    side = options.image_size // options.latent_factor
    rows = []
    for name in names:
        cost = denoiser_cost(
            presets.backbone(name),
            in_channels=options.latent_channels,
            input_size=(side, side),
            num_classes=options.num_classes,
        )
        rows.append(Row(name, "denoiser", cost.parameters, cost.flops))
    return rows


def classifier_rows() -> list[Row]:
    """ViT-5's classifiers."""
    from sit_vit5.analysis.cost import classifier_cost

    costs = {name: classifier_cost(presets.backbone(name)) for name in CLASSIFIERS}
    return [Row(name, "classifier", cost.parameters, cost.flops) for name, cost in costs.items()]


def report(options: ListConfig, denoisers: list[Row], classifiers: list[Row]) -> str:
    """Two tables: denoisers, and classifiers unless there are none."""
    image, side = options.image_size, options.image_size // options.latent_factor
    lines = [
        "GFLOPs: one forward pass of one image, 2 x multiply-adds (papers often give the half)",
        "",
        f"denoisers at {image}x{image} pixels, latents {side}x{side}x{options.latent_channels}, "
        f"{options.num_classes} classes",
        *_table(denoisers),
    ]
    if classifiers:
        lines += [
            "other patches: python -m sit_vit5 models 'ViT5-*/4'",
            "",
            "ViT-5's classifiers at 224x224 pixels, 1000 classes",
            *_table(classifiers),
        ]
    return "\n".join(lines)


def _table(rows: list[Row]) -> list[str]:
    width = max(len(row.model) for row in rows)
    lines = [f"{'model':<{width}}  {'parameters':>13}  {'GFLOPs':>9}"]
    for row in rows:
        lines.append(f"{row.model:<{width}}  {row.parameters:>13,}  {row.flops / 1e9:>9,.2f}")
    return lines
