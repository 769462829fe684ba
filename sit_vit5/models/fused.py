"""Fast CPU kernels: gradients written by hand, and keys padded for PyTorch's bf16 attention.

The network computes the same without them, in plain PyTorch that can be compiled and
differentiated twice or forward. A hand-written gradient can be differentiated once only, so it is
used inside `fused_kernels`, which the trainer enters for eager steps on a CPU; without a gradient
to record, eager code on a CPU always takes these kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sit_vit5.models.rope import as_complex
from sit_vit5.utils.precision import at_least_fp32

EPS = 1e-6  # of every norm

_entered = False


@contextmanager
def fused_kernels(enabled: bool = True) -> Iterator[None]:
    """Record hand-written gradients of operations on CPU tensors inside the context."""
    global _entered
    before, _entered = _entered, enabled
    try:
        yield
    finally:
        _entered = before


def in_use(x: Tensor) -> bool:
    """True if an operation on x takes its kernel from this file."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return _entered or not torch.is_grad_enabled()


def rms_norm(x: Tensor) -> Tensor:
    """x / rms(x) over the last axis, in fp32 or fp64."""
    return _RMSNorm.apply(x) if torch.is_grad_enabled() else _normalize(x)[0]


def rms_norm_rope(x: Tensor, weight: Tensor, table: Tensor | None) -> Tensor:
    """rotate(rms_norm(x) * weight, table) in half the passes over memory.

    x: (..., N, d); weight: (d,) or with axes to broadcast, fp32 or fp64; table: (N, d/2, 2).
    """
    if torch.is_grad_enabled():
        return _RMSNormRope.apply(x, weight, table)
    return _rotate_(_normalize(x)[0].mul_(weight), table)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """scaled_dot_product_attention of bf16 q, k, v (B, K, N, d); an odd number of keys is padded.

    PyTorch's kernel takes twice as long on 201 or 261 keys, with two threads, as on 208 or 272.
    """
    tokens = k.shape[2]
    if tokens % 2 == 0 or tokens > 512:  # beyond 512, padding cost time at 577 and 1,029 keys
        return F.scaled_dot_product_attention(q, k, v)
    padding = -tokens % 16
    k, v = F.pad(k, (0, 0, 0, padding)), F.pad(v, (0, 0, 0, padding))
    bias = F.pad(q.new_zeros(1, 1, 1, tokens), (0, padding), value=-torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class _RMSNorm(torch.autograd.Function):
    """Autograd's own gradient takes three times as long on a CPU.

    With y = x / r and g the gradient by y, that by x is (g - y mean(g y)) / r.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y, inverse = _normalize(x)
        ctx.save_for_backward(y, inverse)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor) -> Tensor:
        y, inverse = ctx.saved_tensors
        along = (g * y).mean(-1, keepdim=True)
        return torch.addcmul(g, y, along, value=-1).mul_(inverse).to(ctx.dtype)


class _RMSNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, table: Tensor | None) -> Tensor:
        y, inverse = _normalize(x)
        ctx.save_for_backward(y, inverse, weight, table)
        ctx.dtype = x.dtype
        return _rotate_(y * weight, table)

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor, None]:
        y, inverse, weight, table = ctx.saved_tensors
        if table is not None:
            rotated_back = as_complex(g.contiguous()) * torch.view_as_complex(table).conj()
            g = torch.view_as_real(rotated_back).flatten(-2)
        product = g * y
        by_weight = product.sum_to_size(weight.shape)
        along = product.mul_(weight).mean(-1, keepdim=True)
        by_y = torch.mul(g, weight, out=product)  # reuses memory, whose bandwidth is the limit
        by_x = by_y.addcmul_(y, along, value=-1).mul_(inverse)
        return by_x.to(ctx.dtype), by_weight, None


def _normalize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x / rms(x) over the last axis and 1 / rms(x), in fp32 or fp64."""
    dtype = at_least_fp32(x[..., :0]).dtype
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    inverse = torch.rsqrt(norm.square() / x.shape[-1] + EPS)
    return x * inverse, inverse


def _rotate_(x: Tensor, table: Tensor | None) -> Tensor:
    """rotate(x, table) in place, or x."""
    if table is not None:
        as_complex(x).mul_(torch.view_as_complex(table))
    return x
