"""Official weights of SiT, DiT, ViT-5 and DeiT-III under our names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from sit_vit5.config.presets import SIZES, Backbone
from sit_vit5.config.recipes import PLAIN, VIT5, Recipe
from sit_vit5.models.classifier import GEOMETRY, ViT5Classifier, position_grid, stored_grid
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.layers import resize_positions
from sit_vit5.models.state_dict import load_weights
from sit_vit5.utils.errors import UserError, brief, listed
from sit_vit5.utils.tensors import check_values, read_weights

# Official SiT and DiT key -> ours, tried in order.
_SIT_KEYS = (
    (r"^pos_embed$", "positions"),
    (r"^x_embedder\.proj\.", "patch_embed.proj."),
    (r"^t_embedder\.mlp\.0\.", "conditioning.time_in."),
    (r"^t_embedder\.mlp\.2\.", "conditioning.time_out."),
    (r"^y_embedder\.embedding_table\.", "conditioning.labels."),
    (r"^blocks\.(\d+)\.attn\.", r"blocks.\1.attention."),
    (r"^blocks\.(\d+)\.adaLN_modulation\.1\.", r"blocks.\1.modulation.linear."),
    (r"^final_layer\.adaLN_modulation\.1\.", "final_modulation.linear."),
    (r"^final_layer\.linear\.", "final."),
)


# Official ViT-5 and DeiT-III key -> ours.
_VIT_KEYS = (
    (r"^pos_embed$", "positions"),
    (r"^reg_token$", "registers"),
    (r"^blocks\.(\d+)\.attn\.", r"blocks.\1.attention."),
    (r"^blocks\.(\d+)\.gamma_([12])$", r"blocks.\1.gate\2.gamma"),
)


_VIT_KEYS_BACK = (
    (r"^positions$", "pos_embed"),
    (r"^registers$", "reg_token"),
    (r"^blocks\.(\d+)\.attention\.", r"blocks.\1.attn."),
    (r"^blocks\.(\d+)\.gate([12])\.gamma$", r"blocks.\1.gamma_\2"),
)


def vit5_state_dict(official: dict[str, Tensor], model: ViT5Classifier) -> dict[str, Tensor]:
    """Weights of the released ViT-5 classifier, or of DeiT-III, for a `ViT5Classifier`.

    Rotary frequencies are buffers there and computed here. Positions of another grid are
    resampled bicubically, as the official fine-tuning does. Weights under our names keep them.
    """
    ours = {}
    for key, tensor in official.items():
        if key == GEOMETRY or key.endswith(("rope.freqs", "rope_reg.freqs")):
            continue
        for pattern, name in _VIT_KEYS:
            key = re.sub(pattern, name, key)
        if key in ("positions", "registers"):
            tensor = tensor.flatten(0, -2)  # (1, N, D) -> (N, D)
        if key == "cls_token":
            tensor = tensor.flatten()
        if key == "patch_embed.proj.weight":
            tensor = tensor.flatten(1)
        if key == "positions" and model.positions is not None:
            old, new = position_grid(official, len(tensor)), model.backbone.grid(model.image_size)
            if old is None:
                raise UserError(
                    f"a position table of {len(tensor)} patches is no square, and the file does "
                    "not name its grid; load it at its own size and save its state dict"
                )
            tensor = tensor if old == new else resize_positions(tensor, old, new)
        ours[key] = tensor
    return ours | model.geometry()


def vit5_official(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a `ViT5Classifier` under the released names and shapes."""
    official = {}
    for key, tensor in weights.items():
        for pattern, name in _VIT_KEYS_BACK:
            key = re.sub(pattern, name, key)
        if key in ("pos_embed", "reg_token"):
            tensor = tensor[None]
        if key == "cls_token":
            tensor = tensor[None, None]
        if key == "patch_embed.proj.weight":  # (D, C * p * p)
            numbers = tensor.shape[1]
            channels = int(weights[GEOMETRY].flatten()[0]) if GEOMETRY in weights else 3
            if GEOMETRY not in weights and math.isqrt(numbers // 3) ** 2 * 3 != numbers:
                channels = 1  # a grey model of before channels were stored
            side = math.isqrt(numbers // channels)
            tensor = tensor.unflatten(1, (channels, side, side))
        official[key] = tensor
    return official


def reversed_time(sit: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a SiT that runs from data (t = 0) to noise, for one from noise to data; exact.

    With t' = 1 - t the velocity changes its sign, and so does the last layer. The time enters as
    cos and sin of t * f: of 1 - t' they are those of t', rotated by f, which the first layer of the
    time embedding takes in:

        W_c cos(f - t'f) + W_s sin(f - t'f) =
            (W_c cos f + W_s sin f) cos t'f + (W_c sin f - W_s cos f) sin t'f
    """
    first = sit["t_embedder.mlp.0.weight"]
    of_cos, of_sin = first.double().chunk(2, dim=1)  # (D, 128) each
    half = of_cos.shape[1]
    f = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float64) / half)
    rotated = [of_cos * f.cos() + of_sin * f.sin(), of_cos * f.sin() - of_sin * f.cos()]
    last = ("final_layer.linear.weight", "final_layer.linear.bias")
    return (
        sit
        | {"t_embedder.mlp.0.weight": torch.cat(rotated, dim=1).float()}
        | {name: -sit[name] for name in last}
    )


def sit_state_dict(official: dict[str, Tensor], model: Denoiser) -> dict[str, Tensor]:
    """Weights of the official SiT (willisma/SiT, models.py) for a denoiser of recipe SiT.

    A learned-sigma output layer is reduced to its first half, the part SiT's forward returns. A
    label table without a null row (class_dropout_prob 0) gets one of zeros.
    """
    ours = {}
    for key, tensor in official.items():
        for pattern, name in _SIT_KEYS:
            key = re.sub(pattern, name, key)
        ours[key] = _fit(key, tensor, model)
    return ours


def _fit(key: str, tensor: Tensor, model: Denoiser) -> Tensor:
    if key == "positions":
        return tensor.squeeze(0)  # (1, N, D) -> (N, D)
    if key == "patch_embed.proj.weight":
        return tensor.flatten(1)  # (D, C, p, p) -> (D, C * p * p)
    if key.startswith("final.") and len(tensor) == 2 * model.final.out_features:
        pixels = model.backbone.patch_size**2
        per_pixel = tensor.unflatten(0, (pixels, 2 * model.in_channels))  # channel fastest
        return per_pixel[:, : model.in_channels].flatten(0, 1)
    if key == "conditioning.labels.weight" and len(tensor) == model.num_classes:
        return torch.cat([tensor, tensor.new_zeros(1, tensor.shape[1])])
    return tensor


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
        """True for weights of SiT or DiT."""
        return "x_embedder.proj.weight" in self.weights

    @property
    def is_classifier(self) -> bool:
        """True for weights of ViT-5's or DeiT-III's classifier."""
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
    """Recipe that the file's keys imply; rotary bases are computed from its frequencies."""
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
