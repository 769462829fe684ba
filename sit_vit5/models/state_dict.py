"""State dicts, checked strictly before they are loaded."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn

from sit_vit5.config.recipes import Recipe
from sit_vit5.utils.errors import UserError, listed

_GAMMA = re.compile(r"blocks\.(\d+)\.gate([12])\.gamma")
_GATES = {"1": 2, "2": 5}  # among the six vectors of adaLN


def load_weights(
    model: nn.Module, weights: dict[str, Tensor], source: Path, *, assign: bool = False
) -> None:
    """Loads all weights, or says which names, shapes or types of `source` do not fit.

    assign: the network keeps the tensors themselves, as one built on the meta device needs.
    """
    check_tensors(weights, model.state_dict(), source)
    model.load_state_dict(weights, assign=assign)


def fold_gammas(weights: dict[str, Tensor], recipe: Recipe) -> dict[str, Tensor]:
    """Weights of a denoiser, with gamma in the bias of the adaLN gate where the recipe has none.

    Files written before `layer_scale sum`, gamma + gate, was removed hold a gamma that is none of
    the recipe that `recipes.successor` reads. Outputs are the same: (W c + b) + gamma =
    W c + (b + gamma). Weights without a gamma, or of a recipe that has it, stay as they are.
    """
    folded = dict(weights)
    for name, gamma in weights.items() if recipe.layer_scale == "none" else ():
        match = _GAMMA.fullmatch(name)
        bias = f"blocks.{match[1]}.modulation.linear.bias" if match else ""
        if bias in folded and folded[bias].shape == (6 * gamma.numel(),):
            vectors = list(folded[bias].chunk(6))
            vectors[_GATES[match[2]]] = vectors[_GATES[match[2]]] + gamma
            folded[bias] = torch.cat(vectors)
            del folded[name]
    return folded


def check_tensors(found: dict[str, Tensor], expected: dict[str, Tensor], source: Path) -> None:
    """Refuses tensors of other names, shapes or types, with up to three names of each kind."""
    shared = [key for key in expected if key in found]
    kinds = {
        "missing": [key for key in expected if key not in found],
        "unexpected": [key for key in found if key not in expected],
        "misshapen": [
            f"{key} {tuple(found[key].shape)} for {tuple(expected[key].shape)}"
            for key in shared
            if found[key].shape != expected[key].shape
        ],
        "of another type": [
            f"{key} {found[key].dtype} for {expected[key].dtype}".replace("torch.", "")
            for key in shared
            if found[key].dtype != expected[key].dtype
        ],
    }
    wrong = [f"{len(keys)} {kind} ({listed(keys, most=3)})" for kind, keys in kinds.items() if keys]
    if wrong:
        raise UserError(f"weights of {source} do not fit the model: {'; '.join(wrong)}")
