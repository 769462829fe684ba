"""One comparison with an official number, and the network that several are made with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sit_vit5.config import presets
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.official import sit_state_dict

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Check:
    """One comparison: it passes where error <= tolerance."""

    name: str
    error: float
    tolerance: float


def difference(ours: Tensor, official: Tensor) -> float:
    """Largest absolute difference in fp64; infinite if the shapes differ."""
    if ours.shape != official.shape:
        return float("inf")
    return (ours.double() - official.double()).abs().max().item()


def official_weights(tensors: Tensors) -> Tensors:
    """The fixture's parameters under their official names."""
    return {k.removeprefix("param."): t for k, t in tensors.items() if k.startswith("param.")}


def official_sit(facts: dict, tensors: Tensors) -> tuple[Denoiser, Tensors]:
    """Our denoiser of recipe SiT or DiT with the fixture's weights, and the official weights.

    Of a learned sigma, SiT's forward returns the first half and DiT's both halves.
    """
    both = facts["fixture"].startswith("dit") and facts["hyperparameters"]["learn_sigma"]
    sizes = facts["hyperparameters"]
    backbone = presets.Backbone(
        width=sizes["hidden_size"],
        depth=sizes["depth"],
        heads=sizes["num_heads"],
        patch_size=sizes["patch_size"],
        mlp_ratio=sizes["mlp_ratio"],
        recipe=presets.RECIPES["SiT"],
    )
    model = Denoiser(
        backbone,
        in_channels=sizes["in_channels"],
        input_size=(sizes["input_size"],) * 2,
        num_classes=sizes["num_classes"],
        out_channels=sizes["in_channels"] * (2 if both else 1),
    )
    official = official_weights(tensors)
    model.load_state_dict(sit_state_dict(official, model))
    return model.eval(), official
