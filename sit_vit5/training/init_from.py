"""Initial weights of a new run from a checkpoint or a classifier: what fits is taken."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from sit_vit5.config.presets import Backbone
from sit_vit5.config.recipes import Recipe
from sit_vit5.models.checkpoint import open_checkpoint
from sit_vit5.models.classifier import (
    GEOMETRY,
    ViT5Classifier,
    is_classifier_folder,
    load_classifier,
)
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.layers import resize_positions
from sit_vit5.models.official import WEIGHTS_SUFFIXES, official_classifier, read_official
from sit_vit5.utils.errors import UserError

LABEL_TABLE = "conditioning.labels.weight"


@dataclass(frozen=True)
class Donor:
    """Weights under a denoiser's names, and what they belong to.

    grid: of their positions; class_names: the rows of the label table; timesteps: see `Denoiser`.
    """

    weights: dict[str, Tensor]
    backbone: Backbone
    grid: tuple[int, int]
    class_names: tuple[str, ...] = ()
    timesteps: int = 0


def init_from(
    model: Denoiser, path: str, class_names: tuple[str, ...]
) -> tuple[dict[str, Tensor], list[str]]:
    """The weights that fit; and lines that say what was taken, resized and left, and why.

    Left where they would mean something else: the label table of other classes, a fixed
    position table, the time embedding of a DiT, which counts diffusion steps.
    """
    donor = _open(path)
    own, taken, resized = model.state_dict(), {}, []
    for name, tensor in (donor.weights | _gates(donor, model)).items():
        if name == "positions" and _can_resize(model, donor, tensor):
            grid = model.backbone.grid(model.input_size)
            tensor = resize_positions(tensor, donor.grid, grid)
            resized.append(f"positions from {_size(donor.grid)} to {_size(grid)}")
        fits = name in own and own[name].shape == tensor.shape
        if fits and _means_the_same(name, model, donor, class_names):
            taken[name] = tensor
    if not taken:
        raise UserError(f"no weight of {path} fits the model; check --model")
    lists = {
        f"initial weights: {len(taken)} of {len(own)} tensors from {path}": list(taken),
        "resized": resized,
        "set so that blocks compute what they did there": [
            name for name in taken if name not in donor.weights
        ],
        "freshly initialised": [name for name in own if name not in taken],
        "not taken from there": [name for name in donor.weights if name not in taken],
        "the donor's blocks differ": _block_differences(donor.backbone, model.backbone),
    }
    lines = [f"{what}: {', '.join(grouped(names))}" for what, names in lists.items() if names]
    return taken, lines


def grouped(names: Iterable[str]) -> list[str]:
    """Names, those of several blocks in one: `blocks.0-27.mlp.fc1.weight`."""
    numbers: dict[str, list[str]] = {}
    for name in names:
        match = re.fullmatch(r"(blocks\.)(\d+)(\..+)", name)
        pattern, number = (f"{match[1]}#{match[3]}", match[2]) if match else (name, "")
        numbers.setdefault(pattern, []).append(number)
    return [
        pattern.replace("#", found[0] if len(found) == 1 else f"{found[0]}-{found[-1]}")
        for pattern, found in numbers.items()
    ]


def _can_resize(model: Denoiser, donor: Donor, positions: Tensor) -> bool:
    grid = model.backbone.grid(model.input_size)
    same_width = positions.shape[1] == model.backbone.width
    return model.backbone.recipe.position == "learned" and same_width and grid != donor.grid


def _means_the_same(name: str, model: Denoiser, donor: Donor, class_names: tuple[str, ...]) -> bool:
    if name == LABEL_TABLE:
        return class_names == donor.class_names
    if name == "positions":
        return model.backbone.recipe.position == "learned"
    if name.startswith("conditioning.time_"):
        return donor.timesteps == model.timesteps
    return True


def _block_differences(donor: Backbone, own: Backbone) -> list[str]:
    """Facts that the shapes of weights do not show, such as the number of heads."""
    found = [] if donor.heads == own.heads else [f"heads {donor.heads} to {own.heads}"]
    for field in fields(Recipe):
        before, after = (getattr(b.recipe, field.name) for b in (donor, own))
        if before != after:
            found.append(f"{field.name} {before} to {after}")
    return found


def classifier_as_denoiser(classifier: ViT5Classifier) -> dict[str, Tensor]:
    """A classifier's weights under a denoiser's names.

    A denoiser's norms have no affine parameters, so the classifier's are folded into the linear
    layer that follows; a shift without a bias to go into keeps its own name. With the gates of
    `_gates`, blocks of the same recipe compute the same function before the first step.
    """
    weights = dict(classifier.state_dict())
    weights.pop(GEOMETRY, None)
    for number in range(classifier.backbone.depth):
        for norm, linear in (("norm1", "attention.qkv"), ("norm2", "mlp.fc1")):
            norm, linear = f"blocks.{number}.{norm}", f"blocks.{number}.{linear}"
            matrix, scale = weights[f"{linear}.weight"], weights.pop(f"{norm}.weight")
            shift = weights.pop(f"{norm}.bias", None)
            if shift is not None and f"{linear}.bias" in weights:
                weights[f"{linear}.bias"] = weights[f"{linear}.bias"] + matrix @ shift
            elif shift is not None:
                weights[f"{norm}.bias"] = shift
            weights[f"{linear}.weight"] = matrix * scale
    return weights


def _gates(donor: Donor, model: Denoiser) -> dict[str, Tensor]:
    """Gammas and gate biases with which a branch is added as in the donor.

    A classifier has gamma and no adaLN gate: the model's gate is 1, or gamma if it has no gamma of
    its own. Where the donor has no gamma, a gamma of the model is 1.
    """
    layer_scale, width = model.backbone.recipe.layer_scale, model.backbone.width
    ones, zeros, gates = torch.ones(width), torch.zeros(2 * width), {}
    if donor.backbone.width != width:
        return {}
    for number in range(min(donor.backbone.depth, model.backbone.depth)):
        names = [f"blocks.{number}.gate{branch}.gamma" for branch in (1, 2)]
        gammas = [donor.weights.get(name, ones) for name in names]
        bias = f"blocks.{number}.modulation.linear.bias"
        from_classifier = bias not in donor.weights
        if layer_scale == "product" or (layer_scale == "instead" and from_classifier):
            gates |= dict(zip(names, gammas, strict=True))
        if from_classifier and layer_scale != "instead":
            first, second = gammas if layer_scale == "none" else (ones, ones)
            gates[bias] = torch.cat([zeros, first, zeros, second])
    return gates


def _open_classifier(path: Path) -> ViT5Classifier | None:
    """The classifier in a folder or a weights file; None if it is neither."""
    if is_classifier_folder(path):
        return load_classifier(path)
    if not path.is_file() or path.suffix not in WEIGHTS_SUFFIXES:
        return None
    advice = f"--init-from needs a folder; first: python -m sit_vit5 convert {path} --to DIR"
    official = read_official(path)
    if not official.is_classifier:
        raise UserError(advice)
    try:
        return official_classifier(official.weights, path)
    except UserError as error:
        raise UserError(f"{error}; {advice}" if "--heads" in str(error) else str(error)) from None


def _open(path: str) -> Donor:
    classifier = _open_classifier(Path(path))
    if classifier is not None:
        grid = classifier.backbone.grid(classifier.image_size)
        return Donor(classifier_as_denoiser(classifier), classifier.backbone, grid)
    checkpoint = open_checkpoint(path)
    backbone, state = checkpoint.config.backbone, checkpoint.state
    return Donor(
        checkpoint.denoiser("ema").state_dict(),
        backbone,
        backbone.grid(state.input_size),
        state.class_names,
        state.timesteps,
    )


def _size(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"
