"""Parts of a block: linear layer, conditioning, modulation, norms, MLPs, attention, positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from sit_vit5.config.recipes import Recipe
from sit_vit5.models import fused
from sit_vit5.models.fused import EPS
from sit_vit5.models.rope import rotate
from sit_vit5.utils.precision import at_least_fp32, no_autocast


def to_weights(x: Tensor, weight: Tensor) -> Tensor:
    """x in the dtype of bf16 or fp16 weights: what the blocks add to is fp32 all the same."""
    return x.to(weight.dtype) if weight.dtype in (torch.bfloat16, torch.float16) else x


class Linear(nn.Linear):
    """`nn.Linear` that also takes fp32 input where a network was loaded in bf16 or fp16."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(to_weights(x, self.weight), self.weight, self.bias)


FREQUENCIES = 256


def timestep_embedding(t: Tensor, width: int, max_period: float = 10000.0) -> Tensor:
    """[cos, sin] of t * max_period^(-i / (width // 2)), (B,) -> (B, width); odd widths end in 0."""
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float32, device=t.device) / half
    angles = t.float()[:, None] * torch.exp(-math.log(max_period) * exponents)
    embedding = torch.cat([angles.cos(), angles.sin()], dim=1)
    return torch.nn.functional.pad(embedding, (0, width % 2))


class Conditioning(nn.Module):
    """SiLU(MLP(time features) + class embedding): the input of every modulation, (B, D)."""

    def __init__(self, width: int, num_classes: int):
        super().__init__()
        self.time_in = Linear(FREQUENCIES, width)
        self.time_out = Linear(width, width)
        # One more row than classes: the null label, learned through class dropout.
        self.labels = nn.Embedding(num_classes + 1, width) if num_classes else None

    def forward(self, t: Tensor, labels: Tensor | None) -> Tensor:
        """t: (B,) in [0, 1]; labels: (B,), not read by an unconditional model."""
        with no_autocast(t.device):
            hidden = nn.functional.silu(self.time_in(timestep_embedding(t, FREQUENCIES)))
            c = self.time_out(hidden)
            if self.labels is not None:
                c = c + self.labels(labels)
            return nn.functional.silu(c)


class Modulation(nn.Module):
    """A zero-initialised linear map of the conditioning to `count` vectors, each (B, 1, D)."""

    def __init__(self, width: int, count: int):
        super().__init__()
        self.count = count
        self.linear = Linear(width, count * width)

    def forward(self, c: Tensor) -> tuple[Tensor, ...]:
        with no_autocast(c.device):
            return self.linear(c)[:, None].chunk(self.count, dim=-1)


def modulate(x: Tensor, shift: Tensor | None, scale: Tensor | None) -> Tensor:
    """x * (1 + scale) + shift in one pass, or x. x: (B, N, D); shift, scale: (B, 1, D) or None."""
    return x if scale is None else torch.addcmul(shift, x, 1 + scale)


def rms_norm(x: Tensor) -> Tensor:
    """x / rms(x) over the last axis, in fp32 or fp64."""
    if fused.in_use(x):
        return fused.rms_norm(x)
    # fp32: squares of bf16 activations lose the small channels in a sum over the width.
    x = at_least_fp32(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def rms_norm_rope(x: Tensor, weight: Tensor, table: Tensor | None = None) -> Tensor:
    """rotate(rms_norm(x) * weight, table), or rms_norm(x) * weight without a table.

    x: (..., N, d); weight: (d,) or with axes to broadcast, fp32 or fp64; table: (N, d/2, 2).
    """
    if fused.in_use(x):
        return fused.rms_norm_rope(x, weight, table)
    y = rms_norm(x) * weight
    return y if table is None else rotate(y, table)


class RMSNorm(nn.Module):
    """x / rms(x) over the last axis, times a weight if `affine`. ViT-5's norm.

    The quotient is cast back before the weight, as the official code does; with bf16 input and an
    fp32 weight the result is fp32.
    """

    def __init__(self, width: int, *, affine: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if affine else None

    def forward(
        self, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None
    ) -> Tensor:
        """x: (..., D); shift, scale: (B, 1, D), of adaLN, for a norm without a weight."""
        if scale is not None:
            return (rms_norm_rope(x, 1 + scale) + shift).to(x.dtype)
        if self.weight is None:
            return rms_norm(x).to(x.dtype)
        if x.dtype == self.weight.dtype:
            return rms_norm_rope(x, self.weight)
        return rms_norm(x).to(x.dtype) * self.weight


class LayerNorm(nn.Module):
    """(x - mean) / std over the last axis, in fp32; times a weight plus a bias if `affine`."""

    def __init__(self, width: int, *, affine: bool):
        super().__init__()
        self.shape = (width,)
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if affine else None

    def forward(
        self, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None
    ) -> Tensor:
        """x: (..., D); shift, scale: (B, 1, D), of adaLN, for a norm without a weight."""
        normed = F.layer_norm(at_least_fp32(x), self.shape, self.weight, self.bias, EPS)
        return modulate(normed.to(x.dtype), shift, scale)


# Token norms by name; affine=False where adaLN supplies scale and shift.
TOKEN_NORMS = {"rms": RMSNorm, "layer": LayerNorm}


class MLP(nn.Module):
    """Linear, activation, linear."""

    def __init__(self, width: int, hidden: int, *, bias: bool, approximate: str):
        super().__init__()
        self.fc1 = Linear(width, hidden, bias=bias)
        self.activation = nn.GELU(approximate=approximate)
        self.fc2 = Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class GatedMLP(nn.Module):
    """fc2(filter(gate, value)) (Shazeer, 2020) with as many weights as the MLP of `hidden`."""

    def __init__(
        self, width: int, hidden: int, *, bias: bool, gated: Callable[[Tensor, Tensor], Tensor]
    ):
        super().__init__()
        narrow = max(round(hidden * 2 / 3 / 8), 1) * 8  # three matrices for two; whole vectors
        self.fc1 = Linear(width, 2 * narrow, bias=bias)
        self.fc2 = Linear(narrow, width, bias=bias)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.gated(*self.fc1(x).chunk(2, dim=-1)))


def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """SiLU(gate) * value (Shazeer, 2020)."""
    return F.silu(gate) * value


def geglu(gate: Tensor, value: Tensor) -> Tensor:
    """GELU(gate) * value with the tanh approximation, as Gemma has it."""
    return F.gelu(gate, approximate="tanh") * value


def clamped_swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """GPT-oss: clamp(gate, max 7) * sigmoid(1.702 gate) * (clamp(value, 7) + 1)."""
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (value.clamp(-7.0, 7.0) + 1)


# (width, hidden, bias=) -> module
MLPS = {
    "gelu": partial(MLP, approximate="none"),
    "gelu_tanh": partial(MLP, approximate="tanh"),
    "swiglu": partial(GatedMLP, gated=swiglu),
    "geglu": partial(GatedMLP, gated=geglu),
    "clamped_swiglu": partial(GatedMLP, gated=clamped_swiglu),
}


class Attention(nn.Module):
    """Bidirectional self-attention; queries and keys are normed per head, then rotated.

    fp32_math: softmax(q k) v written out in fp32, to compare the fused kernels with.
    """

    fp32_math = False

    def __init__(self, width: int, heads: int, recipe: Recipe):
        super().__init__()
        self.heads, self.key_bias = heads, recipe.key_bias
        self.qkv = Linear(width, 3 * width, bias=recipe.qkv_bias)
        self.q_norm = RMSNorm(width // heads, affine=True) if recipe.qk_norm else None
        self.k_norm = RMSNorm(width // heads, affine=True) if recipe.qk_norm else None
        self.sink = nn.Parameter(torch.zeros(heads)) if recipe.attention_sink else None
        self.proj = Linear(width, width, bias=recipe.proj_bias)

    def forward(self, x: Tensor, rope: Tensor | None) -> Tensor:
        """x: (B, N, D); rope: (N, D/K/2, 2) or None."""
        q, k, v = self.queries_keys_values(x, rope)
        mixed = self._attend(q, k, v)
        return self.proj(rearrange(mixed, "b k n d -> b n (k d)"))

    def queries_keys_values(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q and k, normed and rotated, and v, each (B, K, N, D/K) in the dtype of the product."""
        qkv = F.linear(to_weights(x, self.qkv.weight), self.qkv.weight, self._bias())
        qkv = rearrange(qkv, "b n (three k d) -> three b k n d", three=3, k=self.heads)
        both, v = qkv[:2], qkv[2]
        q, k = self._prepare(both, rope).to(v.dtype)
        return q, k, v

    def _prepare(self, both: Tensor, rope: Tensor | None) -> Tensor:
        """Queries and keys (2, B, K, N, D/K), normed and rotated as the recipe has it."""
        if self.q_norm is None:
            return both if rope is None else rotate(both, rope)
        weight = torch.stack([self.q_norm.weight, self.k_norm.weight])[:, None, None, None]
        return rms_norm_rope(both, weight, rope)

    def _bias(self) -> Tensor | None:
        if self.qkv.bias is None or self.key_bias:
            return self.qkv.bias
        query, key, value = self.qkv.bias.chunk(3)
        return torch.cat([query, torch.zeros_like(key), value])

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """softmax(q k / sqrt(d)) in fp32, (B, K, N, N); with a sink, rows sum to less than 1."""
        with no_autocast(q.device):
            logits = q.float() @ k.float().mT / q.shape[-1] ** 0.5
            if self.sink is None:
                return logits.softmax(-1)
            sink = self.sink[:, None, None].expand(len(q), -1, logits.shape[2], 1)
            return torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.fp32_math:
            with no_autocast(q.device):
                return (self.weights(q, k) @ v.float()).to(v.dtype)
        bias = None
        if self.sink is not None:  # one more key of that logit, whose value is zero
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            still = self.sink.new_zeros(self.heads, 1, k.shape[2] - 1)
            bias = torch.cat([still, self.sink[:, None, None]], dim=2)[None].to(q.dtype)
        elif v.dtype == torch.bfloat16 and fused.in_use(v):
            return fused.attention(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def set_attention(model: nn.Module, name: str) -> None:
    """Switches all attention of a network to `fused` or `fp32_math`."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.fp32_math = name == "fp32_math"


class PatchEmbed(nn.Module):
    """Non-overlapping patches to tokens: the strided convolution of ViT, as a matrix product."""

    def __init__(self, in_channels: int, width: int, patch_size: int):
        super().__init__()
        self.patch_size = patch_size
        self.proj = Linear(in_channels * patch_size**2, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, h, w) -> (B, N, D), patches row by row."""
        p = self.patch_size
        return self.proj(rearrange(x, "b c (h p) (w q) -> b (h w) (c p q)", p=p, q=p))


def unpatchify(tokens: Tensor, grid: tuple[int, int], patch_size: int) -> Tensor:
    """(B, N, p * p * C), channel fastest as in DiT -> (B, C, h, w)."""
    return rearrange(
        tokens,
        "b (h w) (p q c) -> b c (h p) (w q)",
        h=grid[0],
        w=grid[1],
        p=patch_size,
        q=patch_size,
    )


def sincos_positions(grid: tuple[int, int], width: int) -> Tensor:
    """Fixed 2D table (N, D) of DiT: first half of D the column, second half the row, each
    [sin, cos] of position * 10000^(-i / (D/4)). Computed in fp64."""
    rows, columns = torch.meshgrid(
        *(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij"
    )
    frequencies = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width / 4))
    halves = []
    for position in (columns, rows):
        angles = position.reshape(-1, 1) * frequencies  # (N, D/4)
        halves += [angles.sin(), angles.cos()]
    return torch.cat(halves, dim=1).float()


def resize_positions(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """A learned table (N, D) for another grid: bicubic, as ViT-5's released code does it."""
    image = rearrange(table, "(h w) d -> 1 d h w", h=old[0], w=old[1])
    resized = F.interpolate(image, size=new, mode="bicubic", align_corners=False)
    return rearrange(resized, "1 d h w -> (h w) d")
