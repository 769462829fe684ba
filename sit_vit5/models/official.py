"""Official weight files: read without running code, recognised by their keys, built as ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from sit_vit5.errors import UserError, brief, listed
from sit_vit5.models.classifier import ViT5Classifier, position_grid, stored_grid
from sit_vit5.models.convert import reversed_time, sit_state_dict, vit5_official, vit5_state_dict
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.state_dict import load_weights
from sit_vit5.presets import SIZES, Backbone
from sit_vit5.recipes import PLAIN, VIT5, Recipe
from sit_vit5.tensors import check_values, read_weights

Weights = dict[str, Tensor]
Model = TypeVar("Model", Denoiser, ViT5Classifier)

REMEDY = "download it again"
PROJECTORS = "projectors."  # REPA's heads onto an encoder's features
WEIGHTS_SUFFIXES = (".pt", ".pth", ".safetensors")

# Where trainers keep their weights: DiT's and SiT's train.py, DeiT's and timm's.
_AVERAGES = ("ema", "model_ema", "state_dict_ema")
_RAW = ("model", "state_dict")


@dataclass(frozen=True)
class OfficialFile:
    """The weights of a file under their official names.

    weights: the averaged ones where the file has both; raw: those in training, or None.
    dropped: names of the heads that only training used, which REPA's files hold.
    """

    path: Path
    weights: Weights
    raw: Weights | None = None
    dropped: tuple[str, ...] = ()

    @property
    def is_denoiser(self) -> bool:
        """Whether these are the weights of SiT or DiT."""
        return "x_embedder.proj.weight" in self.weights

    @property
    def is_classifier(self) -> bool:
        """Whether these are the weights of ViT-5's or DeiT-III's classifier."""
        return "cls_token" in self.weights and "patch_embed.proj.weight" in self.weights


def read_official(path: Path) -> OfficialFile:
    """Reads a .safetensors file or a checkpoint of plain tensors; anything else is refused.

    A state dict of our own classifier, such as timm's scripts save it, is given official names.
    """
    if path.is_dir() or not path.exists():
        raise UserError(f"{path} is no weights file; give a .pt, .pth or .safetensors file")
    found = read_weights(path, remedy=REMEDY)
    average = next((found[key] for key in _AVERAGES if _is_dict(found, key)), None)
    raw = next((found[key] for key in _RAW if _is_dict(found, key)), None)
    if average is None:
        average, raw = found if raw is None else raw, None
    weights = _tensors(average, path)
    raw = None if raw is None else _tensors(raw, path)
    dropped = tuple(key for key in weights if key.startswith(PROJECTORS))
    weights, raw = (part and _without(part, dropped) for part in (weights, raw))
    return OfficialFile(path, weights, raw, dropped)


# Diffusion steps of the released DiT.
DIT_TIMESTEPS = 1000


def official_denoiser(
    weights: Weights,
    source: Path,
    *,
    dit: bool = False,
    from_data: bool = False,
    heads: int | None = None,
    num_classes: int | None = None,
) -> Denoiser:
    """SiT, or DiT, with the weights, its sizes read from their shapes.

    SiT returns the first half of a learned-sigma output, DiT both. from_data: whether time runs
    from data to noise, see `reversed_time`. num_classes: None where the last row of the label table
    is the null label; weights of class_dropout_prob 0 have none.
    """
    with _by_shapes(source, "SiT or DiT"):
        width, in_channels, patch_size, _ = weights["x_embedder.proj.weight"].shape
        side = round(weights["pos_embed"].shape[1] ** 0.5) * patch_size
        rows = len(weights["y_embedder.embedding_table.weight"])
        hidden = len(weights["blocks.0.mlp.fc1.bias"])
        outputs = len(weights["final_layer.linear.bias"]) // patch_size**2
        weights = reversed_time(weights) if from_data else weights
    backbone = _backbone(weights, source, width, hidden, patch_size, heads, PLAIN)
    return _build(
        lambda: Denoiser(
            backbone,
            in_channels=in_channels,
            input_size=(side, side),
            num_classes=rows - 1 if num_classes is None else num_classes,
            out_channels=outputs if dit else None,
            timesteps=DIT_TIMESTEPS if dit else 0,
        ),
        weights,
        sit_state_dict,
        source,
    )


def official_classifier(
    weights: Weights, source: Path, *, heads: int | None = None
) -> ViT5Classifier:
    """A classifier of ViT-5 or DeiT-III with the weights, its sizes read from their shapes."""
    with _by_shapes(source, "ViT-5 classifier"):
        width, in_channels, patch_size, _ = weights["patch_embed.proj.weight"].shape
        hidden = len(weights["blocks.0.mlp.fc1.bias"])
        recipe = _classifier_recipe(weights)
        if "pos_embed" in weights:
            grid = position_grid(weights, weights["pos_embed"].shape[1])
        else:
            grid = stored_grid(weights) or (14, 14)
        classes = len(weights.get("head.weight", ()))
        if heads is None and "blocks.0.attn.q_norm.weight" in weights:
            heads, rest = divmod(width, len(weights["blocks.0.attn.q_norm.weight"]))
            if rest or not heads:
                raise ValueError("the width is no multiple of the norm of the queries")
    if grid is None:
        raise UserError(
            f"{source} has positions of {weights['pos_embed'].shape[1]} patches, which are no "
            "square, and does not name their grid; load it at its own size and save its state dict"
        )
    backbone = _backbone(weights, source, width, hidden, patch_size, heads, recipe)
    return _build(
        lambda: ViT5Classifier(
            backbone,
            image_size=(grid[0] * patch_size, grid[1] * patch_size),
            in_channels=in_channels,
            num_classes=classes,
        ),
        weights,
        vit5_state_dict,
        source,
    )


def _build(
    make: Callable[[], Model],
    weights: Weights,
    convert: Callable[[Weights, Model], Weights],
    source: Path,
) -> Model:
    """A network with official weights; refuses keys that are missing, too many or misshapen."""
    with torch.device("meta"):  # no time for initial values that are replaced at once
        model = make()
    with _by_shapes(source, type(model).__name__):
        converted = {key: tensor.float() for key, tensor in convert(weights, model).items()}
    check_values(converted, source, remedy=REMEDY)  # fp64 may be beyond fp32
    load_weights(model, converted, source, assign=True)
    return model.eval().requires_grad_(False)


@contextmanager
def _by_shapes(source: Path, what: str) -> Iterator[None]:
    """Turns what odd shapes raise into one line."""
    try:
        yield
    except UserError:
        raise
    except (LookupError, ValueError, TypeError, ArithmeticError, RuntimeError) as error:
        raise UserError(f"{source} is no {what}, by its shapes: {brief(error)}") from None


def _is_dict(found: object, key: str) -> bool:
    return isinstance(found, dict) and isinstance(found.get(key), dict)


def _without(weights: Weights, names: tuple[str, ...]) -> Weights:
    return {key: tensor for key, tensor in weights.items() if key not in names}


def _tensors(found: object, path: Path) -> Weights:
    check_values(found, path, remedy=REMEDY)
    if empty := [key for key, tensor in found.items() if not tensor.numel()]:
        raise UserError(
            f"{path} cannot be used: {listed(empty, most=3)} without a number; {REMEDY}"
        )
    # Wrappers of DDP and torch.compile leave their prefixes.
    weights = {re.sub(r"^((module|_orig_mod)\.)+", "", key): t for key, t in found.items()}
    kernel = weights.get("patch_embed.proj.weight")
    if "cls_token" in weights and kernel is not None and kernel.ndim == 2:  # ours is flat
        with _by_shapes(path, "ViT-5 classifier"):
            weights = vit5_official(weights)
    return weights


def _backbone(
    weights: Weights,
    source: Path,
    width: int,
    hidden: int,
    patch_size: int,
    heads: int | None,
    recipe: Recipe,
) -> Backbone:
    depth = len({key.split(".")[1] for key in weights if key.startswith("blocks.")})
    if heads is None:
        published = [size for size in SIZES.values() if size[:2] == (width, depth)]
        if not published:
            raise UserError(f"no published size has width {width} and depth {depth}; give --heads")
        heads = published[0][2]
    try:
        return Backbone(width, depth, heads, patch_size, hidden / width, recipe)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def _classifier_recipe(weights: Weights) -> Recipe:
    """What the file's keys say of the block; rotary bases are computed from its frequencies."""
    first = "blocks.0."
    registers = weights["reg_token"].shape[1] if "reg_token" in weights else 0
    patch_theta, register_theta = (
        _theta(weights, name)
        if f"{first}attn.{name}.freqs" in weights
        # Files without the buffers are ViT-5's all the same if they have its registers.
        else (published if registers else None)
        for name, published in (("rope", VIT5.rope_theta), ("rope_reg", VIT5.register_theta))
    )
    return Recipe(
        norm="layer" if f"{first}norm1.bias" in weights else "rms",
        layer_scale="product" if f"{first}gamma_1" in weights else "none",
        qk_norm=f"{first}attn.q_norm.weight" in weights,
        qkv_bias=f"{first}attn.qkv.bias" in weights,
        position="learned" if "pos_embed" in weights else "none",
        rope_theta=patch_theta,
        registers=registers,
        register_theta=register_theta if registers else None,
    )


def _theta(weights: Weights, name: str) -> float:
    """The base of the frequencies theta^(-i / n), i < n, which all blocks share.

    Published bases are whole and round: those of half precision are rounded to two digits.
    """
    tables = [tensor for key, tensor in weights.items() if key.endswith(f"{name}.freqs")]
    (count,) = tables[0].shape
    if count < 2 or not 0 < tables[0][1] <= 1:
        raise ValueError(f"{name}.freqs are no rotary frequencies")
    exponents = -torch.arange(count, dtype=torch.float64) / count
    estimate = float(tables[0][1].double()) ** -count
    tolerance = max(1e-5, 4 * torch.finfo(tables[0].dtype).eps)
    for theta in (float(f"{estimate:.2g}"), float(round(estimate))):
        if all(
            table.shape == (count,) and table.double().allclose(theta**exponents, rtol=tolerance)
            for table in tables
        ):
            return theta
    raise ValueError(f"{name}.freqs are no powers of one base, the same in all blocks")
