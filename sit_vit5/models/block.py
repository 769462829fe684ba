"""The one block that every recipe is read by."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sit_vit5.models.conditioning import Modulation, modulate
from sit_vit5.models.layers import MLP, TOKEN_NORMS, Attention
from sit_vit5.presets import Recipe


class Gate(nn.Module):
    """What multiplies a branch: LayerScale's gamma and the adaLN gate, met as the recipe says.

    `sum` is one channel filter and equals ViT-5's LayerScale while the gate is zero; `product` is
    two filters in series, which ViT-5 warns of as over-gating; `none` is adaLN-Zero alone.
    """

    def __init__(self, width: int, recipe: Recipe):
        super().__init__()
        self.meets = recipe.layer_scale
        if self.meets != "none":
            self.gamma = nn.Parameter(torch.full((width,), recipe.layer_scale_init))

    def forward(self, gate: Tensor) -> Tensor:
        """gate: (B, 1, D), fp32."""
        if self.meets == "sum":
            return self.gamma + gate
        return self.gamma * gate if self.meets == "product" else gate


class Block(nn.Module):
    """x + gate * attention(modulate(norm(x))), then the same with the MLP."""

    def __init__(self, width: int, heads: int, mlp_ratio: float, recipe: Recipe):
        super().__init__()
        norm = TOKEN_NORMS[recipe.norm]
        self.modulation = Modulation(width, 6)
        self.norm1 = norm(width)
        self.attention = Attention(width, heads, qk_norm=recipe.qk_norm, qkv_bias=recipe.qkv_bias)
        self.gate1 = Gate(width, recipe)
        self.norm2 = norm(width)
        self.mlp = MLP(width, int(width * mlp_ratio), recipe.mlp)
        self.gate2 = Gate(width, recipe)

    def forward(self, x: Tensor, c: Tensor, rope: Tensor | None) -> Tensor:
        """x: (B, N, D); c: conditioning (B, D); rope: (2, N, D/K/2) or None."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)
        attended = self.attention(modulate(self.norm1(x), shift1, scale1), rope)
        x = x + self.gate1(gate1) * attended
        return x + self.gate2(gate2) * self.mlp(modulate(self.norm2(x), shift2, scale2))
