"""Parts of a block: norms, MLPs, attention, patches and absolute positions."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from sit_vit5.models.rope import rotate

EPS = 1e-6


class RMSNorm(nn.Module):
    """x / rms(x) over the last axis, times a weight if `affine`. ViT-5's norm.

    The mean square is taken in fp32 and the quotient cast back before the weight, as the official
    code does; with bf16 input and an fp32 weight the result is fp32.
    """

    def __init__(self, width: int, *, affine: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        # fp32: squares of bf16 activations lose the small channels in a sum over the width.
        x32 = x.float()
        normed = (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)
        return normed if self.weight is None else normed * self.weight


class LayerNorm(nn.Module):
    """(x - mean) / std over the last axis, in fp32; times a weight plus a bias if `affine`."""

    def __init__(self, width: int, *, affine: bool):
        super().__init__()
        self.shape = (width,)
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.shape, self.weight, self.bias, EPS).to(x.dtype)


# Token norms by name; affine=False where adaLN supplies scale and shift.
TOKEN_NORMS = {"rms": RMSNorm, "layer": LayerNorm}


class MLP(nn.Module):
    """Linear, activation, linear."""

    def __init__(self, width: int, hidden: int, *, approximate: str):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.activation = nn.GELU(approximate=approximate)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class SwiGLU(nn.Module):
    """fc2(SiLU(gate) * value) (Shazeer, 2020) with as many weights as the MLP of `hidden`."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        narrow = max(round(hidden * 2 / 3 / 8), 1) * 8  # three matrices for two; whole vectors
        self.fc1 = nn.Linear(width, 2 * narrow)
        self.fc2 = nn.Linear(narrow, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * value)


# (width, hidden) -> module
MLPS = {
    "gelu": partial(MLP, approximate="none"),
    "gelu_tanh": partial(MLP, approximate="tanh"),
    "swiglu": SwiGLU,
}


class Attention(nn.Module):
    """Bidirectional self-attention; queries and keys are normed per head, then rotated."""

    def __init__(self, width: int, heads: int, *, qk_norm: bool, qkv_bias: bool):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.q_norm = RMSNorm(width // heads, affine=True) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(width // heads, affine=True) if qk_norm else nn.Identity()
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, rope: Tensor | None) -> Tensor:
        """x: (B, N, D); rope: (2, N, D/K/2) or None."""
        qkv = rearrange(self.qkv(x), "b n (three k d) -> three b k n d", three=3, k=self.heads)
        q, k, v = qkv.unbind(0)  # (B, K, N, D/K)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        mixed = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v)
        return self.proj(rearrange(mixed, "b k n d -> b n (k d)"))


class PatchEmbed(nn.Module):
    """Non-overlapping patches to tokens: the strided convolution of ViT, as a matrix product."""

    def __init__(self, in_channels: int, width: int, patch_size: int):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Linear(in_channels * patch_size**2, width)

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
