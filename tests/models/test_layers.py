"""Norms, rotation and attention against independent formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sit_vit5.config import presets
from sit_vit5.config.recipes import RECIPES
from sit_vit5.models import fused
from sit_vit5.models.block import Block
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.layers import (
    Attention,
    LayerNorm,
    PatchEmbed,
    RMSNorm,
    clamped_swiglu,
    geglu,
    resize_positions,
    rms_norm,
    rms_norm_rope,
    sincos_positions,
    swiglu,
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
    assert (table[9:, :, 0] == registers.cos().float()).all()
    assert rotary_table((3, 3), 16, theta=None, registers=4, register_theta=None) is None


def test_an_extent_makes_a_side_one_angle_whatever_the_number_of_patches():
    small, large = (rotary_angles((n, n), 16, 100.0, extent=(4.0, 4.0)) for n in (2, 8))
    assert small.max() == 2 and large.max() == 3.5  # the first coordinates of 0, 2 and 0, 0.5, ...
    torch.testing.assert_close(small[1], large[4])  # the middle of the first row
    # DINOv3: (i + 0.5) / 4 * 2 - 1, times 2 pi.
    centred = rotary_angles((4, 4), 16, 100.0, extent=(4 * math.pi,) * 2, centred=True)
    expected = 2 * math.pi * torch.tensor([-0.75, -0.25, 0.25, 0.75], dtype=torch.float64)
    torch.testing.assert_close(centred[:4, 4], expected)


def test_the_compiled_form_of_the_rotation_is_the_same(monkeypatch):
    table = rotary_table((3, 4), 16, theta=100.0, registers=4, register_theta=10.0)
    x = torch.randn(2, 16, 16, requires_grad=True)
    results = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda answer=compiling: answer)
        turned = rotate(x, table)
        (gradient,) = torch.autograd.grad(turned.square().sum() + turned[0].sum(), x)
        results.append((turned, gradient))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("recipe", ["ViT5", "DINOv3", "GPT-oss", "SiT"])
@pytest.mark.parametrize("fp32_math", [False, True])
def test_attention_equals_the_written_out_formula(recipe, fp32_math):
    torch.manual_seed(0)
    recipe = RECIPES[recipe]
    attention = Attention(16, 2, recipe)
    attention.fp32_math = fp32_math
    for parameter in attention.parameters():
        parameter.data.uniform_(-1.5, 1.5)
    x = torch.randn(2, 5, 16)
    table = None
    matrix, bias = attention.qkv.weight, attention.qkv.bias
    if bias is not None and not recipe.key_bias:
        bias = torch.cat([bias[:16], torch.zeros(16), bias[32:]])
    qkv = torch.nn.functional.linear(x, matrix, bias)
    q, k, v = qkv.reshape(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
    if recipe.qk_norm:
        q, k = attention.q_norm(q), attention.k_norm(k)
    if recipe.rope_theta is not None:
        table = rotary_table((1, 5), 8, theta=100.0, registers=0, register_theta=None)
        q, k = rotate(q, table), rotate(k, table)
    weights = (q @ k.transpose(-1, -2) / 8**0.5).exp()
    total = weights.sum(-1, keepdim=True)
    if recipe.attention_sink:
        total = total + attention.sink.exp()[:, None, None]
    mixed = weights / total @ v
    expected = attention.proj(mixed.transpose(1, 2).reshape(2, 5, 16))
    torch.testing.assert_close(attention(x, table), expected)


def test_gated_mlps_are_their_formulas():
    gate, value = torch.tensor([-9.0, 0.5, 9.0]), torch.tensor([2.0, -9.0, 9.0])
    torch.testing.assert_close(swiglu(gate, value), gate * torch.sigmoid(gate) * value)
    clamped, limited = torch.tensor([-9.0, 0.5, 7.0]), torch.tensor([2.0, -7.0, 7.0])
    expected = clamped * torch.sigmoid(1.702 * clamped) * (limited + 1)
    torch.testing.assert_close(clamped_swiglu(gate, value), expected)
    tanh = torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3))
    torch.testing.assert_close(geglu(gate, value), 0.5 * gate * (1 + tanh) * value)


# Magnitudes whose squares, summed in bf16 or multiplied in fp16, would be far off.
LARGE = [1e-3, 1.0, 300.0, 1e5]


def close_to_fp64(low: torch.Tensor, exact: torch.Tensor, relative: float) -> None:
    error = (low.double() - exact).abs().max() / exact.abs().max()
    assert 0 < error < relative


@pytest.mark.parametrize("scale", LARGE)
def test_norms_reduce_in_fp32_under_bf16(scale):
    torch.manual_seed(0)
    x = (scale * (torch.randn(4, 1152) + 3)).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    close_to_fp64(rms_norm(x), exact, 1e-6)
    with torch.no_grad():
        close_to_fp64(rms_norm(x), exact, 1e-6)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    exact = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close_to_fp64(LayerNorm(1152, affine=False)(x.float()), exact, 1e-5)
        close_to_fp64(LayerNorm(1152, affine=False)(x), exact, 2**-8)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_fused_rms_norm_has_autograds_gradient(scale):
    x = (scale * torch.randn(3, 7, dtype=torch.float64)).requires_grad_()
    plain = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    g = torch.randn(3, 7, dtype=torch.float64)
    with fused.fused_kernels():
        assert torch.autograd.gradcheck(rms_norm, x, eps=1e-6 * scale, atol=1e-5 / scale)
        written = rms_norm(x)
    assert "RMSNorm" in written.grad_fn.name()
    torch.testing.assert_close(written, plain)
    results = [torch.autograd.grad(y, x, g) for y in (written, plain)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("weight_shape", [(8,), (2, 1, 8)])  # of a norm; of adaLN, 1 + scale
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_fused_rms_norm_rope_has_autograds_gradients(weight_shape, rotated, scale):
    torch.manual_seed(0)
    table = rotary_table((2, 3), 8, theta=100.0, registers=0, register_theta=None).double()
    x = (scale * torch.randn(2, 6, 8, dtype=torch.float64)).requires_grad_()
    weight = torch.randn(weight_shape, dtype=torch.float64, requires_grad=True)
    with fused.fused_kernels():
        written = rms_norm_rope(x, weight, table if rotated else None)
    plain = rms_norm_rope(x, weight, table if rotated else None)
    assert "RMSNormRope" in written.grad_fn.name() and "RMSNorm" not in plain.grad_fn.name()
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    expected = rotate(expected, table) if rotated else expected
    g = torch.randn(2, 6, 8, dtype=torch.float64)
    results = [(y, *torch.autograd.grad(y, (x, weight), g)) for y in (written, plain, expected)]
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[2])


@pytest.mark.parametrize("name", ["ViT5", "SiT"])
def test_networks_have_second_and_forward_derivatives(name):
    torch.manual_seed(0)
    network = Denoiser(
        replace(presets.backbone(f"{name}-Nano/2"), width=16, heads=2, depth=2),
        in_channels=2, input_size=(4, 4), num_classes=3,
    )  # fmt: skip
    for parameter in network.parameters():  # modulation and output start at zero
        torch.nn.init.normal_(parameter, std=0.3)
    x, v = torch.randn(2, 2, 2, 4, 4)
    t, labels = torch.tensor([0.2, 0.7]), torch.tensor([0, 2])

    def velocity(x: torch.Tensor) -> torch.Tensor:
        return network(x, t, labels)

    # PyTorch's fused attention kernels have neither; its own composition of operations has both.
    with sdpa_kernel(SDPBackend.MATH):
        _, forward = torch.func.jvp(velocity, (x,), (v,))
        difference = (velocity(x + 1e-2 * v) - velocity(x - 1e-2 * v)) / 2e-2
        torch.testing.assert_close(forward, difference, atol=2e-3, rtol=2e-2)
        # <w, J v> by two backward passes through the vector-Jacobian product
        x.requires_grad_()
        w = torch.randn(2, 2, 4, 4, requires_grad=True)
        (pulled,) = torch.autograd.grad(velocity(x), x, w, create_graph=True)
        (twice,) = torch.autograd.grad(pulled, w, v)
        torch.testing.assert_close(twice, forward, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_a_norm_modulates_what_it_normed(norm):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    shift, scale = torch.randn(2, 2, 1, 8, dtype=torch.float64, requires_grad=True)
    norm, g = norm(8, affine=False), torch.randn(2, 5, 8, dtype=torch.float64)
    modulated, plain = norm(x, shift, scale), norm(x) * (1 + scale) + shift
    torch.testing.assert_close(modulated, plain)
    inputs = (x, shift, scale)
    results = [torch.autograd.grad(y, inputs, g, retain_graph=True) for y in (modulated, plain)]
    torch.testing.assert_close(*results)
    with torch.no_grad():
        torch.testing.assert_close(norm(x, shift, scale), plain)


@pytest.mark.parametrize("tokens", [5, 6])
def test_padded_attention_in_bf16_is_that_of_the_formula(tokens):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, tokens, 16).bfloat16().requires_grad_() for _ in range(3))
    mixed, g = fused.attention(q, k, v), torch.randn(2, 3, tokens, 16).bfloat16()
    low = (mixed, *torch.autograd.grad(mixed, (q, k, v), g))
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    mixed = (q @ k.mT / 4).softmax(-1) @ v
    for x, exact in zip(low, (mixed, *torch.autograd.grad(mixed, (q, k, v), g)), strict=True):
        close_to_fp64(x, exact, 2**-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_rope_is_one_function_on_all_paths(monkeypatch, dtype):
    torch.manual_seed(0)
    table = rotary_table((2, 3), 8, theta=100.0, registers=0, register_theta=None)
    qkv = torch.randn(2, 6, 3, 4, 8).to(dtype).requires_grad_()
    x = qkv.permute(2, 0, 3, 1, 4)[:2]  # (2, B, K, N, d), strides as in attention
    weight = torch.rand(2, 1, 1, 1, 8, dtype=torch.promote_types(dtype, torch.float32))
    weight.requires_grad_()
    g, results = torch.randn(x.shape, dtype=weight.dtype), []
    for compiling, kernels in ((True, False), (False, False), (False, True)):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda answer=compiling: answer)
        with fused.fused_kernels(kernels):
            y = rms_norm_rope(x, weight, table)
            with torch.no_grad():
                torch.testing.assert_close(rms_norm_rope(x, weight, table), y)
        results.append((y, *torch.autograd.grad(y, (qkv, weight), g)))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


@pytest.mark.parametrize("scale", LARGE)
def test_queries_and_keys_are_normed_and_turned_in_fp32_under_bf16(scale):
    torch.manual_seed(0)
    attention = Attention(64, 2, RECIPES["ViT5"])
    attention.qkv.weight.data.mul_(scale)
    table = rotary_table((3, 4), 32, theta=100.0, registers=0, register_theta=None)
    x = torch.randn(2, 12, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, _ = attention.queries_keys_values(x, table)
        product = attention.qkv(x)  # bf16: what the matrix product gives, exact from here
    assert product.dtype == q.dtype == torch.bfloat16
    heads = product.double().reshape(2, 12, 3, 2, 32).permute(2, 0, 3, 1, 4)
    for low, exact in ((q, heads[0]), (k, heads[1])):
        exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        even, odd, cos, sin = exact[..., ::2], exact[..., 1::2], *table.double().unbind(-1)
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
        close_to_fp64(low, turned, 2**-8)  # one rounding to bf16 at the end


@pytest.mark.parametrize("scale", LARGE)
def test_gates_and_the_sum_over_blocks_are_fp32_under_bf16(scale):
    torch.manual_seed(0)
    block = Block(32, 2, 4.0, RECIPES["ViT5"])
    x, gate = scale * torch.randn(2, 5, 32), torch.randn(2, 1, 32)
    branch = torch.randn(2, 5, 32).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = block._add(x, block.gate1(gate), branch)
    assert total.dtype == torch.float32
    exact = x.double() + 1e-4 * gate.double() * branch.double()
    close_to_fp64(total, exact, 1e-6)
