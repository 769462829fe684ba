"""Backbones by name: a recipe (what a block is made of), a size and a patch. Imports no torch.

A new size is one line in `SIZES`, a new recipe one in `recipes.RECIPES`. `ViT5-XL/2` is recipe,
size, patch; `ViT5-no_rope-XL/2` is one of the ablations.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Annotated

from annotated_types import Ge, Gt, Le

from sit_vit5.config.fields import MOST_BLOCKS, check_values
from sit_vit5.config.recipes import RECIPES, Recipe, successor
from sit_vit5.utils.errors import UserError, listed, nearest, nearest_multiples
from sit_vit5.utils.files import damaged, parse_json

FP32 = 4  # bytes


@dataclass(frozen=True)
class Backbone:
    """The transformer: size, patch and recipe."""

    width: Annotated[int, Ge(1), Le(2**16)] = 1152
    """Channels of a token."""
    depth: Annotated[int, Ge(1), Le(MOST_BLOCKS)] = 28
    """Number of blocks."""
    heads: Annotated[int, Ge(1), Le(2**16)] = 16
    """Attention heads."""
    patch_size: Annotated[int, Ge(1), Le(1024)] = 2
    """Side of a patch in latent pixels."""
    mlp_ratio: Annotated[float, Gt(0), Le(1024)] = 4.0
    """MLP hidden width as a multiple of the width."""
    recipe: Recipe = Recipe()

    def __post_init__(self) -> None:
        check_backbone(self)

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Patches per column and row of an image or latent (height, width)."""
        p = self.patch_size
        for side in size:
            if side < p or side % p:
                raise UserError(
                    f"size {tuple(size)} is not divisible by patch {p}; "
                    f"use {nearest_multiples(side, p)} instead of {side}"
                )
        return size[0] // p, size[1] // p


# name: (width, depth, heads); S to XL after DiT, SiT and ViT-5, the others for demos and tests.
SIZES: dict[str, tuple[int, int, int]] = {
    "Nano": (64, 4, 4),
    "Micro": (128, 6, 4),
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "XL": (1152, 28, 16),
}

PATCHES = tuple(2**power for power in range(11))
LISTED_PATCHES = PATCHES[:5]


def model_names() -> list[str]:
    """Every name with its patch, such as `ViT5-XL/2`; of the patches the usual ones."""
    return [f"{recipe}-{size}/{p}" for recipe in RECIPES for size in SIZES for p in LISTED_PATCHES]


def backbone(name: str) -> Backbone:
    """The backbone called `name`, such as `ViT5-XL/2`; without a patch, patch 2."""
    full_name = name if "/" in name else f"{name}/2"
    kind, _, patch = full_name.partition("/")
    recipe, _, size = kind.rpartition("-")
    if recipe not in RECIPES or size not in SIZES:
        raise UserError(f"unknown model {name!r}; nearest: {nearest(full_name, model_names())}")
    if patch not in map(str, PATCHES):
        raise UserError(
            f"unknown patch in model {name!r}; a patch is a power of two up to {PATCHES[-1]}, "
            f"such as {kind}/2, or any other by --backbone.patch-size"
        )
    width, depth, heads = SIZES[size]
    return Backbone(width, depth, heads, patch_size=int(patch), recipe=RECIPES[recipe])


def model_name(config: Backbone) -> str | None:
    """The first name of a backbone, or None if it has none."""
    if config.patch_size not in PATCHES:
        return None
    names = (f"{recipe}-{size}/{config.patch_size}" for recipe in RECIPES for size in SIZES)
    return next((name for name in names if backbone(name) == config), None)


def title(name: str, config: Backbone) -> str:
    """The name, with a word where options changed what it stands for."""
    return name if backbone(name) == config else f"{name} (changed)"


def backbone_from_dict(
    plain: dict, *, conditional: bool = True, source: object = "backbone", remedy: str = ""
) -> Backbone:
    """The backbone of nested plain values, as `dataclasses.asdict` gives them, checked by type.

    A recipe of before an option existed has its default; nothing else may be missing or unknown.
    conditional: whether adaLN gates its blocks, which older files need to be read.
    source, remedy: as in `parse_json`.
    """
    sizes, options = ({field.name for field in fields(kind)} for kind in (Backbone, Recipe))
    recipe = plain.get("recipe")
    recipe = dict(recipe) if isinstance(recipe, dict) else {}
    if odd := (plain.keys() ^ sizes) | (recipe.keys() - options):
        reason = f"backbone lacks or does not know {listed(sorted(odd))}"
        raise UserError(damaged(source, reason, remedy))
    if "layer_scale" in recipe:
        recipe["layer_scale"] = successor(recipe["layer_scale"], conditional=conditional)
        plain = plain | {"recipe": recipe}
    return parse_json(json.dumps(plain), Backbone, source=source, remedy=remedy)


def check_backbone(config: Backbone) -> None:
    """Refuses shapes that no block can have."""
    recipe = config.recipe
    check_values(config, "backbone.")
    if int(config.width * config.mlp_ratio) < 1:
        raise UserError(f"backbone.mlp_ratio {config.mlp_ratio} must give the MLP a channel")
    if config.width % config.heads:
        raise UserError(
            f"backbone.width {config.width} is not divisible by backbone.heads {config.heads}"
        )
    if recipe.position != "none" and config.width % 4:
        raise UserError(
            f"backbone.width {config.width} must be divisible by 4 for a 2D position table"
        )
    rotated = recipe.rope_theta is not None or recipe.register_theta is not None
    if rotated and (config.width // config.heads) % 4:
        raise UserError(
            f"head width {config.width // config.heads} must be divisible by 4 for a 2D rotation; "
            "change backbone.width or backbone.heads, or set both thetas of the recipe to None"
        )
    if recipe.register_theta is not None and not _is_square(recipe.registers):
        raise UserError(
            f"backbone.recipe.registers {recipe.registers} must be a square number to be rotated; "
            "use 1, 4 or 9, or unrotated ones: --backbone.recipe.register-theta None"
        )


def _is_square(number: int) -> bool:
    """Whether tokens fill a square grid, which has at least one."""
    return number > 0 and math.isqrt(number) ** 2 == number


def weight_count(backbone: Backbone) -> int:
    """Weights of the blocks' large matrices: a lower bound of a network's size."""
    attention, mlp = 4, 2 * backbone.mlp_ratio
    return int(backbone.depth * backbone.width**2 * (attention + mlp))


def activation_bytes(backbone: Backbone, input_size: tuple[int, int]) -> int:
    """Bytes of one image's hidden activations in one MLP: a lower bound of a forward pass."""
    tokens = input_size[0] * input_size[1] // backbone.patch_size**2
    return int(tokens * backbone.width * max(backbone.mlp_ratio, 1) * FP32)
