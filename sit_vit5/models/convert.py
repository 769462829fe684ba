"""Official state dicts under our names."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from sit_vit5.errors import UserError
from sit_vit5.models.classifier import GEOMETRY, ViT5Classifier, position_grid
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.layers import resize_positions

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
