"""Official state dicts under our names."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from sit_vit5.models.classifier import ViT5Classifier
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


def vit5_state_dict(official: dict[str, Tensor], model: ViT5Classifier) -> dict[str, Tensor]:
    """Weights of the released ViT-5 classifier, or of DeiT-III, for a `ViT5Classifier`.

    Rotary frequencies are buffers there and computed here. Positions of another grid are
    resampled bicubically, as the official fine-tuning does.
    """
    ours = {}
    for key, tensor in official.items():
        if key.endswith(("rope.freqs", "rope_reg.freqs")):
            continue
        for pattern, name in _VIT_KEYS:
            key = re.sub(pattern, name, key)
        if key in ("positions", "registers"):
            tensor = tensor.squeeze(0)
        if key == "cls_token":
            tensor = tensor.flatten()
        if key == "patch_embed.proj.weight":
            tensor = tensor.flatten(1)
        if key == "positions" and len(tensor) != len(model.positions):
            side = round(len(tensor) ** 0.5)
            new = model.backbone.grid(model.image_size)
            tensor = resize_positions(tensor, (side, side), new)
        ours[key] = tensor
    return ours


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
