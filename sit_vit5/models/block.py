"""The one block that every recipe is read by."""

from __future__ import annotations

import warnings
from functools import cache, partial

import torch
from torch import Tensor, nn

from sit_vit5.config.recipes import Recipe
from sit_vit5.models.layers import MLPS, TOKEN_NORMS, Attention, Modulation
from sit_vit5.utils.errors import UserError


@cache
def warn_over_gating() -> None:
    """Says once that LayerScale and a gated MLP filter the same channels twice."""
    warnings.warn(
        "LayerScale with a gated MLP over-gates: ViT-5 (Wang et al., 2026) measured suppressed "
        "channels and lower accuracy; use mlp gelu, or layer_scale none",
        stacklevel=3,
    )


class Gate(nn.Module):
    """Factor of a branch per channel: LayerScale's gamma and the adaLN gate.

    `product` is gamma * gate: ViT-5's block, whose branches end in gamma, inside SiT's line
    x + gate * branch. `none` is SiT's gate alone; `instead` is gamma alone, as in the classifier.
    A sum gamma + gate would be `none` under another name: the gate has a bias, so gamma added to it
    gives the same functions and the same gradients.
    """

    def __init__(self, width: int, recipe: Recipe):
        super().__init__()
        scaled = recipe.layer_scale != "none"
        gamma = torch.full((width,), recipe.layer_scale_init)
        self.gamma = nn.Parameter(gamma) if scaled else None

    def forward(self, gate: Tensor | None) -> Tensor | None:
        """gate: (B, 1, D), fp32, or None where adaLN gives none; None: nothing to multiply."""
        if self.gamma is None:
            return gate
        return self.gamma if gate is None else self.gamma * gate


class Block(nn.Module):
    """x + gate * post_norm(attention(modulate(norm(x)))), then the same with the MLP.

    gate: see `Gate`. conditional: adaLN modulates and, unless layer_scale is `instead`, gates.
    Otherwise, as in ViT-5's classifier, the norms have affine parameters and gamma is the gate.
    drop_path: probability per sample and branch, in training, that the branch is skipped.
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
        if not 0 <= drop_path < 1:
            raise UserError(f"drop_path {drop_path} must be at least 0 and below 1")
        if recipe.gated_mlp and recipe.layer_scale != "none":
            warn_over_gating()
        norm = partial(TOKEN_NORMS[recipe.norm], width, affine=not conditional)
        self.modulation = Modulation(width, recipe.modulation_vectors) if conditional else None
        self.norm1 = norm()
        self.attention = Attention(width, heads, recipe)
        self.post_norm1 = norm() if recipe.post_norm else nn.Identity()
        self.gate1 = Gate(width, recipe)
        self.norm2 = norm()
        hidden = int(width * mlp_ratio + 1e-6)  # hidden / width * width may fall below hidden
        self.mlp = MLPS[recipe.mlp](width, hidden, bias=recipe.mlp_bias)
        self.post_norm2 = norm() if recipe.post_norm else nn.Identity()
        self.gate2 = Gate(width, recipe)
        self.drop_path = drop_path

    def forward(self, x: Tensor, c: Tensor | None, rope: Tensor | None) -> Tensor:
        """x: (B, N, D), fp32; c: conditioning (B, D), None if unconditional; rope: (N, D/K/2, 2)"""
        shift1, scale1, gate1, shift2, scale2, gate2 = self._modulation(c)
        attended = self.attention(self.norm1(x, shift1, scale1), rope)
        x = self._add(x, self.gate1(gate1), self.post_norm1(attended))
        mixed = self.mlp(self.norm2(x, shift2, scale2))
        return self._add(x, self.gate2(gate2), self.post_norm2(mixed))

    def _modulation(self, c: Tensor | None) -> tuple[Tensor | None, ...]:
        """Shift, scale and gate of both branches; None where there is none."""
        if self.modulation is None:
            return (None,) * 6
        vectors = self.modulation(c)
        if len(vectors) == 6:
            return vectors
        shift1, scale1, shift2, scale2 = vectors
        return shift1, scale1, None, shift2, scale2, None

    def _add(self, x: Tensor, gate: Tensor | None, branch: Tensor) -> Tensor:
        branch = self._drop(branch)
        branch = branch.to(x.dtype)  # on a CPU faster than mixing dtypes in the sum
        return x + branch if gate is None else torch.addcmul(x, gate, branch)  # in one pass

    def _drop(self, branch: Tensor) -> Tensor:
        """Stochastic depth (Huang et al., 2016): kept branches are scaled to keep the mean."""
        if not self.training or not self.drop_path:
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.drop_path
        return branch * kept / (1 - self.drop_path)
