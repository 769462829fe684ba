"""The denoiser in diffusers' shape."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from sit_vit5.config import presets
from sit_vit5.config.presets import Backbone
from sit_vit5.interop.diffusers import ViT5SiT
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.utils.errors import UserError


def network(recipe: str) -> Denoiser:
    torch.manual_seed(0)
    backbone = Backbone(32, 2, 2, patch_size=2, recipe=presets.RECIPES[recipe])
    model = Denoiser(backbone, in_channels=2, input_size=(8, 12), num_classes=3)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


@pytest.mark.parametrize("recipe", sorted(presets.RECIPES))
@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_every_recipe_survives_the_round_trip_and_predicts_the_same(
    tmp_path, recipe, low_cpu_mem_usage
):
    model = network(recipe)
    ViT5SiT.from_denoiser(model).save_pretrained(tmp_path)
    again = ViT5SiT.from_pretrained(tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    inputs = torch.randn(2, 2, 8, 12), torch.tensor([0.1, 0.9]), torch.tensor([0, 3])
    assert torch.equal(again(*inputs), model(*inputs))
    assert (again.backbone, again.input_size) == (model.backbone, (8, 12))
    assert [file.name for file in tmp_path.glob("*.safetensors")] == [
        "diffusion_pytorch_model.safetensors"
    ]


def test_the_configuration_is_plain_json_and_wrong_ones_are_refused(tmp_path):
    ViT5SiT.from_denoiser(network("ViT5")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["backbone"]["recipe"]["register_theta"] == 100
    assert config["_class_name"] == "ViT5SiT"
    with pytest.raises(UserError, match="backbone lacks or does not know colour"):
        ViT5SiT(backbone={"width": 32, "recipe": {}, "colour": 1})


def test_it_is_a_denoiser_with_gradient_checkpointing():
    model = ViT5SiT(asdict(Backbone(32, 2, 2)), in_channels=2, input_size=(8, 8), num_classes=3)
    assert isinstance(model, Denoiser) and model.null_label == 3
    model.enable_gradient_checkpointing()
    assert model.activation_checkpointing
    model.disable_gradient_checkpointing()
    assert not model.activation_checkpointing
    assert model.to(torch.float64).dtype == torch.float64
