"""Initial weights of a new run from a checkpoint or a classifier: what fits is taken."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from sit_vit5.checkpoint import open_checkpoint
from sit_vit5.errors import UserError
from sit_vit5.models.classifier import ViT5Classifier
from sit_vit5.models.classifier_folder import is_classifier_folder, load_classifier
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.layers import resize_positions
from sit_vit5.models.official import WEIGHTS_SUFFIXES

LABEL_TABLE = "conditioning.labels.weight"


@dataclass(frozen=True)
class Donor:
    """Weights under a denoiser's names, the grid of their positions, the classes they know."""

    weights: dict[str, Tensor]
    grid: tuple[int, int]
    class_names: tuple[str, ...]


def init_from(model: Denoiser, path: str, class_names: tuple[str, ...]) -> list[str]:
    """Copies the weights that fit; lines that say what was taken, resized and left.

    The label table is left where the classes are others, whatever its shape: row 3 would mean
    another class (row D21).
    """
    donor = _open(path)
    own, taken, resized = model.state_dict(), {}, []
    for name, tensor in donor.weights.items():
        if name == "positions" and model.positions is not None and model.positions.requires_grad:
            grid = model.backbone.grid(model.input_size)
            if grid != donor.grid and tensor.shape[1] == model.backbone.width:
                tensor = resize_positions(tensor, donor.grid, grid)
                resized.append(f"positions from {_size(donor.grid)} to {_size(grid)}")
        known = name != LABEL_TABLE or class_names == donor.class_names
        if known and name in own and own[name].shape == tensor.shape:
            taken[name] = tensor
    if not taken:
        raise UserError(f"no weight of {path} fits the model; check --model")
    model.load_state_dict(own | taken)
    fresh = grouped(name for name in own if name not in taken)
    unused = grouped(name for name in donor.weights if name not in taken)
    lines = [f"initial weights: {len(taken)} of {len(own)} tensors from {path}"]
    lines += [f"resized: {', '.join(resized)}"] if resized else []
    lines += [f"freshly initialised: {', '.join(fresh)}"] if fresh else []
    return lines + ([f"not taken from there: {', '.join(unused)}"] if unused else [])


def grouped(names) -> list[str]:
    """Names with the numbers of blocks as a star, each once: 28 blocks read as one."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))


def classifier_as_denoiser(classifier: ViT5Classifier) -> dict[str, Tensor]:
    """A classifier's weights under a denoiser's names.

    A denoiser's norms have no affine parameters, so the classifier's are folded into the linear
    layer that follows: its blocks compute the same function while the modulation is zero.
    """
    weights = dict(classifier.state_dict())
    for number in range(classifier.backbone.depth):
        for norm, linear in (("norm1", "attention.qkv"), ("norm2", "mlp.fc1")):
            norm, linear = f"blocks.{number}.{norm}", f"blocks.{number}.{linear}"
            matrix, scale = weights[f"{linear}.weight"], weights.pop(f"{norm}.weight")
            shift = weights.pop(f"{norm}.bias", None)
            if shift is not None:
                weights[f"{linear}.bias"] = weights[f"{linear}.bias"] + matrix @ shift
            weights[f"{linear}.weight"] = matrix * scale
    return weights


def _open(path: str) -> Donor:
    if is_classifier_folder(Path(path)):
        classifier = load_classifier(Path(path))
        grid = classifier.backbone.grid(classifier.image_size)
        return Donor(classifier_as_denoiser(classifier), grid, ())
    if Path(path).is_file() and Path(path).suffix in WEIGHTS_SUFFIXES:
        raise UserError(
            f"--init-from wants a folder; first: python -m sit_vit5.convert {path} --to DIR"
        )
    checkpoint = open_checkpoint(path)
    grid = checkpoint.config.backbone.grid(checkpoint.state.input_size)
    return Donor(checkpoint.weights("ema"), grid, checkpoint.state.class_names)


def _size(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"
