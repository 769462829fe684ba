"""The one block that every recipe is read by."""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor, nn

from sit_vit5.models.conditioning import Modulation, modulate
from sit_vit5.models.layers import MLPS, TOKEN_NORMS, Attention
from sit_vit5.presets import Recipe


@cache
def warn_over_gating() -> None:
    """Says once that LayerScale and a gated MLP filter the same channels twice."""
    warnings.warn(
        "LayerScale with a gated MLP over-gates: ViT-5 (Wang et al., 2026) measured suppressed "
        "channels and lower accuracy; use mlp gelu, or layer_scale none",
        stacklevel=3,
    )


class Gate(nn.Module):
    """What multiplies a branch: LayerScale's gamma and the adaLN gate, met as the recipe says.

    `sum` is one channel filter and equals ViT-5's LayerScale while the gate is zero; `product` is
    two filters in series, which ViT-5 warns of as over-gating; `none` is adaLN-Zero alone. Without
    a gate, as in the classifier, gamma stands alone: `sum` and `product` are the same.
    """

    def __init__(self, width: int, recipe: Recipe):
        super().__init__()
        self.meets = recipe.layer_scale
        if self.meets != "none":
            self.gamma = nn.Parameter(torch.full((width,), recipe.layer_scale_init))

    def forward(self, gate: Tensor | None) -> Tensor | float:
        """gate: (B, 1, D), fp32, or None in an unconditional block."""
        if self.meets == "none":
            return 1.0 if gate is None else gate
        if gate is None:
            return self.gamma
        return self.gamma + gate if self.meets == "sum" else self.gamma * gate


class Block(nn.Module):
    """x + gate * attention(modulate(norm(x))), then the same with the MLP.

    conditional: adaLN modulates and gates. Otherwise, as in ViT-5's classifier, the norms have
    affine parameters and LayerScale is the gate. drop_path: probability per sample and branch, in
    training, that the branch is skipped.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_ratio: float,
        recipe: Recipe,
        *,
        conditional: bool = True,
        drop_path: float = 0.0,
    ):
        super().__init__()
        if recipe.mlp == "swiglu" and recipe.layer_scale != "none":
            warn_over_gating()
        norm = TOKEN_NORMS[recipe.norm]
        self.modulation = Modulation(width, 6) if conditional else None
        self.norm1 = norm(width, affine=not conditional)
        self.attention = Attention(width, heads, qk_norm=recipe.qk_norm, qkv_bias=recipe.qkv_bias)
        self.gate1 = Gate(width, recipe)
        self.norm2 = norm(width, affine=not conditional)
        self.mlp = MLPS[recipe.mlp](width, int(width * mlp_ratio))
        self.gate2 = Gate(width, recipe)
        self.drop_path = drop_path

    def forward(self, x: Tensor, c: Tensor | None, rope: Tensor | None) -> Tensor:
        """x: (B, N, D); c: conditioning (B, D), None if unconditional; rope: (2, N, D/K/2)."""
        if self.modulation is None:
            x = x + self._drop(self.gate1(None) * self.attention(self.norm1(x), rope))
            return x + self._drop(self.gate2(None) * self.mlp(self.norm2(x)))
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)
        attended = self.attention(modulate(self.norm1(x), shift1, scale1), rope)
        x = x + self._drop(self.gate1(gate1) * attended)
        mixed = self.mlp(modulate(self.norm2(x), shift2, scale2))
        return x + self._drop(self.gate2(gate2) * mixed)

    def _drop(self, branch: Tensor) -> Tensor:
        """Stochastic depth (Huang et al., 2016): kept branches are scaled to keep the mean."""
        if not self.training or not self.drop_path:
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.drop_path
        return branch * kept / (1 - self.drop_path)
