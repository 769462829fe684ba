"""The classifier: features, head, sizes, stochastic depth. Its numbers: tests/parity."""

from __future__ import annotations

import pytest
import torch

from sit_vit5.config import presets
from sit_vit5.config.presets import Backbone
from sit_vit5.models.classifier import ViT5Classifier
from sit_vit5.utils.errors import UserError


def tiny(recipe: str = "ViT5", **options) -> ViT5Classifier:
    torch.manual_seed(0)
    backbone = Backbone(32, 2, 2, patch_size=4, recipe=presets.RECIPES[recipe])
    model = ViT5Classifier(backbone, **{"image_size": (16, 16), "num_classes": 5, **options})
    for name, parameter in model.named_parameters():
        if "gamma" in name:
            parameter.data.fill_(0.5)
    return model


@pytest.mark.parametrize("recipe", [name for name in presets.RECIPES if name not in ("SiT", "DiT")])
def test_features_are_cls_patches_and_registers(recipe):
    model = tiny(recipe).eval()
    images = torch.randn(2, 3, 16, 16)
    features, registers = model.forward_features(images), presets.RECIPES[recipe].registers
    assert features.cls.shape == (2, 32)
    assert features.patches.shape == (2, 16, 32)
    assert features.registers.shape == (2, registers, 32)
    torch.testing.assert_close(model.head(features.cls), model(images))
    assert len(model.forward_blocks(images)) == 3


def test_other_sizes_run_rectangular_too_and_indivisible_ones_are_refused():
    model = tiny().eval()
    assert model.forward_features(torch.randn(1, 3, 8, 24)).patches.shape == (1, 12, 32)
    with pytest.raises(UserError, match="not divisible by patch 4; use 16 or 20 instead of 18"):
        model(torch.randn(1, 3, 16, 18))
    with pytest.raises(UserError, match="not divisible by patch 4"):
        tiny(image_size=(16, 18))


def test_rescaling_the_rotation_changes_other_sizes_only():
    integer, rescaled = tiny().eval(), tiny(rescale_rope=True).eval()
    own, larger = torch.randn(1, 3, 16, 16), torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(integer(own), rescaled(own))
    assert (integer(larger) - rescaled(larger)).abs().max() > 1e-5


def test_resetting_the_head_keeps_the_features():
    model = tiny().eval()
    images = torch.randn(2, 3, 16, 16)
    before = model.forward_features(images).cls
    model.reset_classifier(7)
    assert model(images).shape == (2, 7) and model.num_classes == 7
    model.reset_classifier(0)
    assert (model(images) == before).all()
    with pytest.raises(UserError, match="must not be negative"):
        model.reset_classifier(-1)


def test_a_reset_head_is_where_the_model_is_and_in_its_dtype():
    model = tiny().double().eval()
    model.reset_classifier(7)
    assert model(torch.randn(2, 3, 16, 16).double()).dtype == torch.float64
    model = tiny().to("meta")
    model.reset_classifier(7)
    assert model.head.weight.device.type == "meta"


def test_drop_path_acts_in_training_only_and_keeps_the_mean():
    model, images = tiny(drop_path=0.5), torch.randn(1, 3, 16, 16).expand(600, -1, -1, -1)
    still = tiny().eval()
    exact = still.blocks[0](still.forward_blocks(images[:1])[0], None, still.rope((4, 4), "cpu"))
    model.eval()
    assert (model(images[:2]) == model(images[:2])).all()
    model.train()
    with torch.no_grad():
        tokens = model.forward_blocks(images)
    moved = (tokens[1] - tokens[0]).flatten(1).abs().amax(1)
    assert 0.15 < (moved == 0).float().mean() < 0.35  # both branches skipped: a quarter
    torch.testing.assert_close(tokens[1].mean(0), exact[0], atol=0.25, rtol=0)


def test_gradients_reach_every_parameter():
    model = tiny()
    model(torch.randn(2, 3, 16, 16)).square().mean().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
