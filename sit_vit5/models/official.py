"""Official weight files: read without running code, recognised by their keys, built as ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from sit_vit5.errors import UserError
from sit_vit5.models.classifier import ViT5Classifier
from sit_vit5.models.convert import sit_state_dict, vit5_state_dict
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.state_dict import load_weights
from sit_vit5.presets import SIZES, Backbone
from sit_vit5.recipes import PLAIN, VIT5, Recipe
from sit_vit5.tensors import check_values, read_weights

Weights = dict[str, Tensor]
Model = TypeVar("Model", Denoiser, ViT5Classifier)

REMEDY = "download it again"
WEIGHTS_SUFFIXES = (".pt", ".pth", ".safetensors")

# Where trainers keep their weights: DiT's and SiT's train.py, DeiT's and timm's.
_AVERAGES = ("ema", "model_ema", "state_dict_ema")
_RAW = ("model", "state_dict")


@dataclass(frozen=True)
class OfficialFile:
    """The weights of a file under their official names.

    weights: the averaged ones where the file has both; raw: those in training, or None.
    """

    path: Path
    weights: Weights
    raw: Weights | None = None

    @property
    def is_denoiser(self) -> bool:
        """Whether these are the weights of SiT or DiT."""
        return "x_embedder.proj.weight" in self.weights

    @property
    def is_classifier(self) -> bool:
        """Whether these are the weights of ViT-5's or DeiT-III's classifier."""
        return "cls_token" in self.weights and "patch_embed.proj.weight" in self.weights


def read_official(path: Path) -> OfficialFile:
    """Reads a .safetensors file or a checkpoint of plain tensors; anything else is refused."""
    if path.is_dir() or not path.exists():
        raise UserError(f"{path} is no weights file; give a .pt, .pth or .safetensors file")
    found = read_weights(path, remedy=REMEDY)
    average = next((found[key] for key in _AVERAGES if _is_dict(found, key)), None)
    raw = next((found[key] for key in _RAW if _is_dict(found, key)), None)
    if average is None:
        return OfficialFile(path, _tensors(raw if raw is not None else found, path))
    return OfficialFile(path, _tensors(average, path), None if raw is None else _tensors(raw, path))


# Diffusion steps of the released DiT.
DIT_TIMESTEPS = 1000


def official_denoiser(
    weights: Weights,
    source: Path,
    *,
    dit: bool = False,
    heads: int | None = None,
    num_classes: int | None = None,
) -> Denoiser:
    """SiT, or DiT, with the weights, its sizes read from their shapes.

    SiT returns the first half of a learned-sigma output, DiT both. num_classes: None where the last
    row of the label table is the null label; weights of class_dropout_prob 0 have none.
    """
    try:
        width, in_channels, patch_size, _ = weights["x_embedder.proj.weight"].shape
        side = round(weights["pos_embed"].shape[1] ** 0.5) * patch_size
        rows = len(weights["y_embedder.embedding_table.weight"])
        hidden = len(weights["blocks.0.mlp.fc1.bias"])
        outputs = len(weights["final_layer.linear.bias"]) // patch_size**2
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise UserError(f"{source} is no SiT or DiT, by its shapes: {error}") from None
    backbone = _backbone(weights, width, hidden, patch_size, heads, PLAIN)
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
    try:
        width, in_channels, patch_size, _ = weights["patch_embed.proj.weight"].shape
        hidden = len(weights["blocks.0.mlp.fc1.bias"])
        recipe = _classifier_recipe(weights)
        grid = round(weights["pos_embed"].shape[1] ** 0.5) if "pos_embed" in weights else 14
        classes = len(weights.get("head.weight", ()))
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise UserError(f"{source} is no ViT-5 classifier, by its shapes: {error}") from None
    if heads is None and "blocks.0.attn.q_norm.weight" in weights:
        heads = width // len(weights["blocks.0.attn.q_norm.weight"])
    backbone = _backbone(weights, width, hidden, patch_size, heads, recipe)
    return _build(
        lambda: ViT5Classifier(
            backbone,
            image_size=(grid * patch_size,) * 2,
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
    converted = {key: tensor.float() for key, tensor in convert(weights, model).items()}
    check_values(converted, source, remedy=REMEDY)  # fp64 may be beyond fp32
    load_weights(model, converted, source, assign=True)
    return model.eval().requires_grad_(False)


def _is_dict(found: object, key: str) -> bool:
    return isinstance(found, dict) and isinstance(found.get(key), dict)


def _tensors(found: object, path: Path) -> Weights:
    check_values(found, path, remedy=REMEDY)
    # Wrappers of DDP and torch.compile leave their prefixes.
    return {
        key.removeprefix("module.").removeprefix("_orig_mod."): tensor
        for key, tensor in found.items()
    }


def _backbone(
    weights: Weights, width: int, hidden: int, patch_size: int, heads: int | None, recipe: Recipe
) -> Backbone:
    depth = len({key.split(".")[1] for key in weights if key.startswith("blocks.")})
    if heads is None:
        published = [size for size in SIZES.values() if size[:2] == (width, depth)]
        if not published:
            raise UserError(f"no published size has width {width} and depth {depth}; give --heads")
        heads = published[0][2]
    return Backbone(width, depth, heads, patch_size, hidden / width, recipe)


def _classifier_recipe(weights: Weights) -> Recipe:
    """What the file's keys say of the block; rotary bases are computed from its frequencies."""
    first = "blocks.0."
    registers = weights["reg_token"].shape[1] if "reg_token" in weights else 0
    patch_theta, register_theta = (
        _theta(weights[f"{first}attn.{name}.freqs"])
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


def _theta(frequencies: Tensor) -> float:
    """The base of theta^(-i / n), i < n; whole, as all published ones are."""
    if len(frequencies) < 2:
        raise ValueError("the rotary frequencies")
    return float(round(float(frequencies[1].double()) ** -len(frequencies)))
