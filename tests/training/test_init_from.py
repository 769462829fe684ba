"""Initial weights from a classifier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sit_vit5.errors import UserError
from sit_vit5.models.classifier import ViT5Classifier
from sit_vit5.models.classifier_folder import save_classifier
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.presets import RECIPES, Backbone
from sit_vit5.training.init_from import grouped, init_from


def classifier(recipe: str) -> ViT5Classifier:
    torch.manual_seed(0)
    model = ViT5Classifier(
        Backbone(32, 3, 2, patch_size=4, recipe=RECIPES[recipe]), image_size=(16, 16), num_classes=5
    )
    for parameter in model.parameters():  # norms and gammas that matter
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


def denoiser(recipe: str, size: int = 8, **changes) -> Denoiser:
    backbone = replace(Backbone(32, 3, 2, patch_size=2, recipe=RECIPES[recipe]), **changes)
    return Denoiser(backbone, in_channels=1, input_size=(size, size), num_classes=3).eval()


def take(model: Denoiser, path: str, class_names: tuple[str, ...]) -> list[str]:
    """As a new run does; what it says."""
    taken, lines = init_from(model, path, class_names)
    model.load_state_dict(model.state_dict() | taken)
    return lines


@pytest.mark.parametrize("recipe", ["ViT5", "DeiT3"])
def test_the_blocks_of_a_classifier_compute_the_same_in_a_denoiser(tmp_path, recipe):
    donor, model = classifier(recipe), denoiser(recipe)
    save_classifier(donor, tmp_path / "donor", source={})
    lines = take(model, str(tmp_path / "donor"), ())
    tokens = torch.randn(2, 16 + model.backbone.recipe.registers, 32)
    rope = model.rope((4, 4), tokens.device)
    ours, theirs = tokens, tokens
    for mine, its in zip(model.blocks, donor.blocks, strict=True):
        ours, theirs = mine(ours, torch.randn(2, 32), rope), its(theirs, None, rope)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    assert torch.equal(model.positions, donor.positions)
    said = "\n".join(lines)
    assert "freshly initialised: patch_embed.proj.weight, conditioning.time_in.weight" in said
    assert "blocks.0-2.modulation.linear.weight" in said
    assert "blocks.0-2.attention.qkv.weight, " in said.splitlines()[0]
    assert "differ" not in said
    assert "not taken from there: cls_token, " in said and "norm.weight" in said


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


def test_what_cannot_serve_is_refused(tmp_path):
    save_classifier(classifier("ViT5"), tmp_path / "donor", source={})
    with pytest.raises(UserError, match="no weight of .* fits the model; check --model"):
        take(denoiser("ViT5", width=64), str(tmp_path / "donor"), ())
    (tmp_path / "vit5.pth").touch()
    with pytest.raises(UserError, match=r"first: python -m sit_vit5.convert .*vit5.pth --to DIR"):
        take(denoiser("ViT5"), str(tmp_path / "vit5.pth"), ())
    with pytest.raises(UserError, match="does not exist"):
        take(denoiser("ViT5"), str(tmp_path / "nothing"), ())
    assert grouped(["blocks.0.a", "blocks.1.a", "b", "blocks.3.c"]) == [
        "blocks.0-1.a", "b", "blocks.3.c",
    ]  # fmt: skip
    assert Path(tmp_path / "donor").is_dir()
