"""Attention maps, suppressed channels, classifiers from files: against numbers known otherwise."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from PIL import Image

from sit_vit5.analysis.attention import (
    Tokens,
    attention_weights,
    branch_gates,
    channel_scales,
    choose_blocks,
    patch_maps,
    suppressed_share,
)
from sit_vit5.config import presets
from sit_vit5.config.presets import Backbone
from sit_vit5.config.recipes import VIT5
from sit_vit5.models.classifier import ViT5Classifier, save_classifier
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.layers import Attention, PatchEmbed
from sit_vit5.models.rope import rotary_table, rotate
from sit_vit5.utils.errors import UserError

GOLDEN = Path(__file__).parent / "golden"


def classifier(recipe: str = "ViT5", **sizes) -> ViT5Classifier:
    torch.manual_seed(0)
    backbone = Backbone(**{"width": 32, "depth": 2, "heads": 2, "patch_size": 4, **sizes})
    model = ViT5Classifier(
        replace(backbone, recipe=presets.RECIPES[recipe]), image_size=(16, 16), num_classes=5
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def weights_of(attention: Attention, x: torch.Tensor, rope: torch.Tensor | None) -> torch.Tensor:
    q, k, _ = attention.queries_keys_values(x, rope)
    return attention.weights(q, k)


def denoiser(layer_scale: str = "product") -> Denoiser:
    torch.manual_seed(0)
    recipe = replace(VIT5, layer_scale=layer_scale)
    backbone = Backbone(32, 2, 2, patch_size=2, recipe=recipe)
    model = Denoiser(backbone, in_channels=1, input_size=(4, 6), num_classes=3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_weights_are_the_written_out_softmax_and_give_the_modules_output():
    torch.manual_seed(0)
    attention = Attention(16, 2, replace(VIT5, qkv_bias=True))
    attention.q_norm.weight.data.uniform_(0.5, 1.5)
    x, table = torch.randn(2, 5, 16), rotary_table((1, 5), 8, theta=100.0, registers=0,
                                                   register_theta=None)  # fmt: skip
    q, k, v = attention.qkv(x).reshape(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
    q, k = (rotate(norm(part), table) for norm, part in
            ((attention.q_norm, q), (attention.k_norm, k)))  # fmt: skip
    scores = (q @ k.transpose(-1, -2) / 8**0.5).exp()
    weights = weights_of(attention, x, table)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 5))
    mixed = attention.proj((weights @ v).transpose(1, 2).reshape(2, 5, 16))
    torch.testing.assert_close(mixed, attention(x, table))


@pytest.mark.parametrize("kind", ["classifier", "denoiser"])
def test_recorded_weights_reproduce_what_each_block_attended(kind):
    if kind == "classifier":
        model, arguments = classifier(), (torch.randn(1, 3, 16, 16),)
    else:
        model = denoiser()
        arguments = (torch.randn(1, 1, 4, 6), torch.tensor([0.5]), torch.tensor([1]))
    seen = {}
    for number, block in enumerate(model.blocks):
        block.attention.register_forward_hook(
            lambda module, inputs, output, number=number: seen.update({number: (inputs[0], output)})
        )
    weights = attention_weights(lambda: model(*arguments), model.blocks, [1, 0])
    assert set(weights) == {0, 1}
    for number, (x, output) in seen.items():
        attention = model.blocks[number].attention
        v = attention.qkv(x)[..., 64:].unflatten(-1, (2, 16)).transpose(1, 2)  # (1, K, N, d)
        expected = attention.proj((weights[number] @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(expected, output)
    model(*arguments)
    assert not any(block.attention._forward_pre_hooks for block in model.blocks)


@pytest.mark.parametrize("target", [(0, 0), (0, 2), (1, 0), (1, 2)])
def test_a_register_made_to_look_at_one_patch_peaks_there_on_a_rectangle(target):
    embed = PatchEmbed(1, 8, 2)
    embed.proj.weight.data = torch.eye(8)[:, :1].expand(8, 4).clone()  # channel 0: the light
    embed.proj.bias.data.zero_()
    image = torch.zeros(1, 1, 4, 6)
    image[..., 2 * target[0], 2 * target[1]] = 1.0
    register = torch.eye(8)[None, 1:2]
    attention = Attention(8, 1, replace(VIT5, qk_norm=False))
    q, k = torch.zeros(8, 8), torch.eye(8)
    q[0, 1] = 30.0  # the register asks for light
    attention.qkv.weight.data = torch.cat([q, k, torch.eye(8)])
    weights = weights_of(attention, torch.cat([embed(image), register], 1), None)
    found = patch_maps(weights[0], Tokens(0, (2, 3), 1))["register 0"]
    assert found.weights.shape == (2, 3)
    assert divmod(found.weights.argmax().item(), 3) == target
    assert found.weights[target] > 0.99 and found.contrast > 5.9


def test_maps_are_cut_at_their_queries_and_count_the_rest():
    tokens = Tokens(1, (2, 3), 2)
    weights = torch.zeros(2, 9, 9)
    weights[0, 0, 0], weights[0, 0, 2] = 0.25, 0.75  # cls: a quarter on itself
    weights[1, 0, 8] = 1.0
    weights[:, 8, 1:7] = 1 / 6  # the last register: everywhere alike
    heads = patch_maps(weights, tokens, head=0)
    assert list(heads) == ["cls", "register 0", "register 1"]
    assert heads["cls"].weights.tolist() == [[0, 0.75, 0], [0, 0, 0]]
    assert (heads["cls"].share, patch_maps(weights, tokens, head=1)["cls"].share) == (0.75, 0)
    mean = patch_maps(weights, tokens)
    assert mean["cls"].share == 0.375
    assert mean["register 1"].contrast == pytest.approx(1) == mean["register 1"].share
    with pytest.raises(UserError, match="not finite"):
        patch_maps(weights * float("nan"), tokens)


def test_without_cls_and_registers_the_map_is_the_mean_over_queries():
    weights = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
    (name, found), *others = patch_maps(weights, Tokens(0, (1, 2), 0)).items()
    assert name == "mean over queries" and not others
    assert found.weights.tolist() == [[0.75, 0.25]]


def test_default_blocks_are_spread_and_end_with_the_last():
    assert choose_blocks((), 12) == [0, 4, 7, 11]
    assert choose_blocks((), 1) == [0] and choose_blocks((), 3) == [0, 1, 2]
    assert choose_blocks((5, 2), 6) == [5, 2]
    for number in (-1, 6):
        with pytest.raises(UserError, match=f"block {number} is not in 0..5"):
            choose_blocks((number,), 6)


def test_suppressed_share_of_known_scales():
    # Means of |scale|: 0.715, 1 and 0; a signed mean would be -0.685 and 0.
    scale = torch.tensor([[-0.05] * 1 + [0.05] * 2 + [-1.0] * 7, [1.0, -1.0] * 5, [0.0] * 10])
    assert suppressed_share(scale, 0.1).tolist() == pytest.approx([0.3, 0, 1])
    assert suppressed_share(scale, 0.05).tolist() == pytest.approx([0, 0, 1])
    normal = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(0))
    assert suppressed_share(normal, 0.1).item() == pytest.approx(0.0636, abs=0.004)


def test_scales_of_a_classifier_are_its_gammas_or_one():
    model = classifier()
    model.blocks[1].gate2.gamma.data = torch.tensor([1e-3] * 8 + [1.0] * 24)
    gates = branch_gates(model.blocks, None, fraction=0.1)
    assert gates[1]["MLP"].shares.tolist() == [0.25]
    assert gates[1]["MLP"].mean_scale == pytest.approx((8e-3 + 24) / 32)
    assert (channel_scales(model.blocks, None)[0]["attention"] == model.blocks[0].gate1.gamma).all()
    plain = branch_gates(classifier("ViT5-no_layer_scale").blocks, None, fraction=0.1)
    assert (plain[0]["MLP"].shares.tolist(), plain[0]["MLP"].mean_scale) == ([0], 1)


@pytest.mark.parametrize(
    ("layer_scale", "effective"),
    [
        ("product", lambda g, a: g * a),
        ("none", lambda g, a: a),
        ("instead", lambda g, a: g.expand(5, -1)),
    ],
)
def test_scales_of_a_denoiser_are_what_the_recipe_makes_of_gamma_and_gate(layer_scale, effective):
    model, c = denoiser(layer_scale), torch.randn(5, 32)
    found = channel_scales(model.blocks, c)
    for block, scales in zip(model.blocks, found, strict=True):
        rows = block.modulation.linear(c).reshape(5, -1, 32)
        for gate, branch, index in ((block.gate1, "attention", 2), (block.gate2, "MLP", -1)):
            expected = effective(gate.gamma, rows[:, index])
            torch.testing.assert_close(scales[branch].expand(5, -1), expected)


def test_the_command_draws_a_classifier_at_its_own_and_another_size(tmp_path, capsys):
    main = runpy.run_path(str(ROOT / "evaluate" / "attention.py"))["main"]
    save_classifier(classifier(), tmp_path / "tiny", source={})
    options = ["--classifier", str(tmp_path / "tiny"), "--image", "digits:4"]
    sizes, maps = [], []
    for more in ([], ["--image-size", "24", "--blocks", "1"]):
        main(options + more)
        path = Path(capsys.readouterr().out.splitlines()[-2])
        assert path == tmp_path / "tiny_attention" / "attention.png"
        sizes.append(Image.open(path).size)
        maps.append(path.read_bytes())
    assert sizes[0][0] == sizes[1][0] and sizes[0][1] > 1.5 * sizes[1][1]  # two blocks, one


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--image", "digits:4", "--image-size", "18"], "not divisible by patch 4"),
        (["--image", "digits:4", "--blocks", "2"], "block 2 is not in 0..1"),
        (["--label", "1"], "label has no use for a classifier"),
        ([], "no image given: use --image FILE"),
        (None, "give either a denoiser by --checkpoint RUN or --classifier PATH"),
    ],
)
def test_the_command_refuses_wrong_options_of_a_classifier(argv, message, tmp_path):
    main = runpy.run_path(str(ROOT / "evaluate" / "attention.py"))["main"]
    save_classifier(classifier(), tmp_path / "tiny", source={})
    with pytest.raises(UserError) as error:
        main([] if argv is None else ["--classifier", str(tmp_path / "tiny"), *argv])
    assert message in str(error.value) and "\n" not in str(error.value)
