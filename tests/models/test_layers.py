"""Norms, rotation and attention against independent formulas."""

from __future__ import annotations

import pytest
import torch

from sit_vit5.models.layers import (
    Attention,
    LayerNorm,
    PatchEmbed,
    RMSNorm,
    resize_positions,
    sincos_positions,
    unpatchify,
)
from sit_vit5.models.rope import rotary_angles, rotary_table, rotate


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_reduces_in_fp32(scale, dtype):
    x = (scale * torch.randn(4, 1152, generator=torch.Generator().manual_seed(0))).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    relative = ((RMSNorm(1152, affine=False)(x).double() - exact) / exact).abs().max()
    assert relative < (1e-6 if dtype == torch.float32 else 2**-8)  # half a unit of bf16


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_layer_norm_reduces_in_fp32(offset):
    x = (offset + torch.randn(4, 1152, generator=torch.Generator().manual_seed(0))).bfloat16()
    centred = x.double() - x.double().mean(-1, keepdim=True)
    exact = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert (LayerNorm(1152, affine=False)(x).double() - exact).abs().max() < 0.02


def test_patch_embed_is_the_strided_convolution():
    embed = PatchEmbed(3, 16, 4)
    images = torch.randn(2, 3, 8, 12)
    kernel = embed.proj.weight.reshape(16, 3, 4, 4)
    convolved = torch.nn.functional.conv2d(images, kernel, embed.proj.bias, stride=4)
    torch.testing.assert_close(embed(images), convolved.flatten(2).transpose(1, 2))


def test_unpatchify_puts_patches_where_patch_embed_took_them():
    images = torch.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)
    rows = images.reshape(2, 3, 2, 2, 3, 2).permute(0, 2, 4, 3, 5, 1)  # b h w p q c
    assert (unpatchify(rows.reshape(2, 6, 12), (2, 3), 2) == images).all()


def test_sincos_positions_know_rows_from_columns_on_a_rectangle():
    table = sincos_positions((2, 3), 8).reshape(2, 3, 8)
    assert (table[0, :, 4:] == table[0, :1, 4:]).all()  # second half: the row, equal along it
    assert (table[:, 1, :4] == table[:1, 1, :4]).all()  # first half: the column
    assert table[1, 2, 0] == torch.sin(torch.tensor(2.0))


def test_resized_positions_keep_the_picture():
    smooth = sincos_positions((8, 8), 4)
    doubled = resize_positions(smooth, (8, 8), (16, 16)).reshape(16, 16, 4)
    middle = doubled.reshape(8, 2, 8, 2, 4).mean((1, 3)).reshape(64, 4)
    assert (middle - smooth).abs().mean() < 0.03
    assert (resize_positions(smooth, (8, 8), (8, 8)) - smooth).abs().max() < 1e-6


def test_rotation_makes_scores_a_function_of_the_offset_on_each_axis():
    table = rotary_table((5, 6), 16, theta=100.0, registers=0, register_theta=None)
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    scores = rotate(q.expand(30, 16), table) @ rotate(k.expand(30, 16), table).T
    scores = scores.reshape(5, 6, 5, 6)
    torch.testing.assert_close(scores[1, 2, 2, 4], scores[2, 3, 3, 5])
    torch.testing.assert_close(scores[0, 0, 3, 0], scores[1, 5, 4, 5])
    assert (scores[0, 0, 1, 0] - scores[0, 0, 0, 1]).abs() > 1e-3  # rows are not columns


def test_rotation_keeps_lengths_and_leaves_unrotated_tokens_alone():
    table = rotary_table((2, 2), 8, theta=None, registers=4, register_theta=100.0)
    x = torch.randn(3, 8, 8)
    turned = rotate(x, table)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert (turned[:, :5] == x[:, :5]).all()  # patches, and the register at (0, 0)
    assert (turned[:, 5:] - x[:, 5:]).abs().amax(-1).min() > 1e-3


def test_registers_turn_on_their_own_grid_after_the_patches():
    table = rotary_table((3, 3), 16, theta=10000.0, registers=4, register_theta=100.0)
    registers = rotary_angles((2, 2), 16, 100.0)
    assert (table[0, 9:] == registers.cos().float()).all()
    assert rotary_table((3, 3), 16, theta=None, registers=4, register_theta=None) is None


def test_attention_equals_the_written_out_formula():
    torch.manual_seed(0)
    attention = Attention(16, 2, qk_norm=True, qkv_bias=True)
    attention.q_norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(2, 5, 16)
    table = rotary_table((1, 5), 8, theta=100.0, registers=0, register_theta=None)
    q, k, v = attention.qkv(x).reshape(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
    q = rotate(attention.q_norm(q), table)
    k = rotate(attention.k_norm(k), table)
    weights = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, dim=-1)
    expected = attention.proj((weights @ v).transpose(1, 2).reshape(2, 5, 16))
    torch.testing.assert_close(attention(x, table), expected)
