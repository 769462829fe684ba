"""Official state dicts under our names."""

from __future__ import annotations

import re

from torch import Tensor

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


def sit_state_dict(official: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the official SiT (willisma/SiT, models.py) for a `Denoiser` of recipe SiT."""
    ours = {}
    for key, tensor in official.items():
        for pattern, name in _SIT_KEYS:
            key = re.sub(pattern, name, key)
        if key == "positions":
            tensor = tensor.squeeze(0)  # (1, N, D) -> (N, D)
        if key == "patch_embed.proj.weight":
            tensor = tensor.flatten(1)  # (D, C, p, p) -> (D, C * p * p)
        ours[key] = tensor
    return ours
