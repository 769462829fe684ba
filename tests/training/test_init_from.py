"""Initial weights from a classifier."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import TINY, assert_equal, golden_weights, run_here
from safetensors.torch import load_file, save_file

from sit_vit5.config.presets import RECIPES, Backbone
from sit_vit5.config.recipes import Recipe
from sit_vit5.models.checkpoint import open_checkpoint
from sit_vit5.models.classifier import ViT5Classifier, save_classifier
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.training.init_from import grouped, init_from
from sit_vit5.utils.errors import UserError


def classifier(recipe: str) -> ViT5Classifier:
    torch.manual_seed(0)
    model = ViT5Classifier(
        Backbone(32, 3, 2, patch_size=4, recipe=RECIPES[recipe]), image_size=(16, 16), num_classes=5
    )
    for parameter in model.parameters():  # norms and gammas that matter
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


def denoiser(recipe: str | Recipe, size: int = 8, **changes) -> Denoiser:
    recipe = RECIPES[recipe] if isinstance(recipe, str) else recipe
    backbone = replace(Backbone(32, 3, 2, patch_size=2, recipe=recipe), **changes)
    return Denoiser(backbone, in_channels=1, input_size=(size, size), num_classes=3).eval()


def take(model: Denoiser, path: str, class_names: tuple[str, ...]) -> list[str]:
    """As a new run does; what it says."""
    taken, lines = init_from(model, path, class_names)
    model.load_state_dict(model.state_dict() | taken)
    return lines


@pytest.mark.parametrize("recipe", ["ViT5", "DeiT3", "ViT5-no_layer_scale"])
def test_the_blocks_of_a_classifier_compute_the_same_in_a_denoiser(tmp_path, recipe):
    donor, model = classifier(recipe), denoiser(recipe)
    save_classifier(donor, tmp_path / "donor", source={})
    lines = take(model, str(tmp_path / "donor"), ())
    tokens = torch.randn(2, 16 + model.backbone.recipe.registers, 32)
    assert_same_blocks(model, donor, tokens)
    assert torch.equal(model.positions, donor.positions)
    said = "\n".join(lines)
    assert "freshly initialised: patch_embed.proj.weight, conditioning.time_in.weight" in said
    assert "blocks.0-2.modulation.linear.weight" in said
    assert "blocks.0-2.attention.qkv.weight, " in said.splitlines()[0]
    assert (
        "set so that blocks compute what they did there: blocks.0-2.modulation.linear.bias" in said
    )
    assert "differ" not in said
    assert "not taken from there: cls_token, " in said and "norm.weight" in said


def assert_same_blocks(model: Denoiser, donor: ViT5Classifier, tokens: torch.Tensor) -> None:
    """Equal outputs whatever conditions the denoiser, and branches that add to their input."""
    rope = model.rope((4, 4), tokens.device)
    ours, theirs = tokens, tokens
    for mine, its in zip(model.blocks, donor.blocks, strict=True):
        ours, theirs = mine(ours, torch.randn(2, 32), rope), its(theirs, None, rope)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    assert (ours - tokens).abs().max() > 0.1


@pytest.mark.parametrize("donor", ["ViT5", "ViT5-no_layer_scale"])
@pytest.mark.parametrize("layer_scale", ["none", "product", "instead"])
def test_a_classifiers_branches_keep_their_size(tmp_path, donor, layer_scale):
    donor = classifier(donor)
    save_classifier(donor, tmp_path / "donor", source={})
    model = denoiser(replace(RECIPES["ViT5"], layer_scale=layer_scale))
    take(model, str(tmp_path / "donor"), ())
    assert_same_blocks(model, donor, torch.randn(2, 20, 32))


def test_gates_without_gamma_keep_their_size_under_a_product(tmp_path):
    options = ["--backbone.recipe.layer-scale", "none", "--output-dir", str(tmp_path)]
    run_here("train_sit.py", *TINY, "--steps", "2", *options)
    donor = open_checkpoint(tmp_path / "tiny").denoiser("ema")
    recipe = replace(donor.backbone.recipe, layer_scale="product")
    model = Denoiser(
        replace(donor.backbone, recipe=recipe), in_channels=1, input_size=(8, 8), num_classes=10
    )
    lines = take(model, str(tmp_path / "tiny"), tuple(map(str, range(10))))
    inputs = torch.randn(2, 1, 8, 8), torch.tensor([0.2, 0.7]), torch.tensor([3, 10])
    torch.testing.assert_close(model(*inputs), donor(*inputs))
    assert "the donor's blocks differ: layer_scale none to product" in lines


def test_positions_of_another_grid_are_resized_and_said(tmp_path):
    save_classifier(classifier("ViT5"), tmp_path / "donor", source={})
    model = denoiser("ViT5", size=12)
    before = model.positions.clone()
    lines = take(model, str(tmp_path / "donor"), ())
    assert "resized: positions from 4x4 to 6x6" in lines
    assert not torch.equal(model.positions, before)


def test_fixed_positions_and_other_heads_are_neither_taken_nor_silent(tmp_path):
    save_classifier(classifier("ViT5"), tmp_path / "donor", source={})
    model = denoiser("SiT", heads=4)
    before = model.positions.clone()
    said = "\n".join(take(model, str(tmp_path / "donor"), ()))
    assert torch.equal(model.positions, before)
    assert "freshly initialised: positions" in said
    assert (
        "the donor's blocks differ: heads 2 to 4, norm rms to layer, mlp gelu to gelu_tanh" in said
    )


def test_a_norm_whose_shift_finds_no_bias_is_left_and_said(tmp_path):
    for recipe in ("ViT5-no_rms_norm", "VisionLLaMA"):
        save_classifier(classifier(recipe), tmp_path / recipe, source={})
        said = "\n".join(take(denoiser(recipe), str(tmp_path / recipe), ()))
        assert "not taken from there: " in said and "blocks.0-2.norm" in said


def test_a_state_dict_serves_as_the_folder_does(tmp_path):
    donor = classifier("ViT5")
    save_classifier(donor, tmp_path / "donor", source={})
    content = {"epoch": 3, "state_dict": donor.state_dict(), "args": Namespace(lr=1e-3)}
    torch.save(content, tmp_path / "timm.pth.tar.pth")
    torch.save(donor.state_dict(), tmp_path / "plain.pt")
    expected, _ = init_from(denoiser("ViT5"), str(tmp_path / "donor"), ())
    for name in ("timm.pth.tar.pth", "plain.pt"):
        taken, _ = init_from(denoiser("ViT5"), str(tmp_path / name), ())
        assert_equal(taken, expected)


def test_a_damaged_donor_is_refused_before_it_is_taken(tmp_path):
    run_here("train_sit.py", *TINY, "--output-dir", tmp_path, "--steps", 1)
    folder = open_checkpoint(tmp_path / "tiny").folder
    file = folder / "ema_0.995.safetensors"
    weights = load_file(file)
    for name in ("positions", "final.bias"):
        save_file(weights | {name: torch.tensor(1.0)}, file)
        with pytest.raises(UserError, match=rf"1 misshapen .{name} \(\) for"):
            init_from(denoiser("ViT5"), str(folder), ())


def test_what_cannot_serve_is_refused(tmp_path):
    save_classifier(classifier("ViT5"), tmp_path / "donor", source={})
    with pytest.raises(UserError, match="no weight of .* fits the model; check --model"):
        take(denoiser("ViT5", width=64), str(tmp_path / "donor"), ())
    torch.save(golden_weights("sit_model_nosigma"), tmp_path / "sit.pt")
    with pytest.raises(UserError, match=r"first: python -m sit_vit5 convert .*sit.pt --to DIR"):
        take(denoiser("ViT5"), str(tmp_path / "sit.pt"), ())
    weights = golden_weights("deit3_ls_classifier")
    torch.save(weights, tmp_path / "deit.pth")
    with pytest.raises(UserError, match=r"give --heads; --init-from needs a folder; first: python"):
        take(denoiser("DeiT3"), str(tmp_path / "deit.pth"), ())
    (tmp_path / "vit5.pth").touch()
    with pytest.raises(UserError, match="vit5.pth cannot be read: it is empty"):
        take(denoiser("ViT5"), str(tmp_path / "vit5.pth"), ())
    with pytest.raises(UserError, match="does not exist"):
        take(denoiser("ViT5"), str(tmp_path / "nothing"), ())
    assert grouped(["blocks.0.a", "blocks.1.a", "b", "blocks.3.c"]) == [
        "blocks.0-1.a", "b", "blocks.3.c",
    ]  # fmt: skip
    assert Path(tmp_path / "donor").is_dir()
