"""LayerScale beside the adaLN gate, and older files in which gamma was added to it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import TINY, run_here
from safetensors.torch import load_file, save_file
from torch import Tensor

from sit_vit5.config.presets import Backbone
from sit_vit5.config.recipes import VIT5
from sit_vit5.interop.diffusers import ViT5SiT
from sit_vit5.models.block import Gate
from sit_vit5.models.checkpoint import open_checkpoint
from sit_vit5.models.classifier import ViT5Classifier, load_classifier, save_classifier
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.state_dict import fold_gammas

NONE = replace(VIT5, layer_scale="none")
POSTHOC = "posthoc-ema"


def network(layer_scale: str) -> Denoiser:
    """Two blocks whose every weight matters."""
    torch.manual_seed(0)
    backbone = Backbone(32, 2, 2, patch_size=2, recipe=replace(VIT5, layer_scale=layer_scale))
    model = Denoiser(backbone, in_channels=1, input_size=(8, 8), num_classes=3)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def prediction(model: Denoiser) -> Tensor:
    x_t = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return model(x_t, torch.linspace(0.1, 0.9, 4), torch.tensor([0, 1, 2, 0]))


def loaded(weights: dict[str, Tensor], layer_scale: str) -> Denoiser:
    model = network(layer_scale)
    model.load_state_dict(weights)
    return model


def test_a_sum_of_gamma_and_gate_is_no_gamma(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Gate, "forward", lambda self, gate: self.gamma + gate)
        model = network("product")
        expected = prediction(model)
        expected.square().mean().backward()
    other = loaded(fold_gammas(model.state_dict(), NONE), "none")
    ours = prediction(other)
    ours.square().mean().backward()
    torch.testing.assert_close(ours, expected)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=name)
    for number, block in enumerate(model.blocks):
        of_bias = gradients[f"blocks.{number}.modulation.linear.bias"].chunk(6)
        assert torch.equal(block.gate1.gamma.grad, of_bias[2])
        assert torch.equal(block.gate2.gamma.grad, of_bias[5])


def test_a_product_trains_otherwise_than_no_gamma():
    product, none = network("product"), network("none")
    weights = product.state_dict()
    for number, block in enumerate(product.blocks):
        for kind in ("weight", "bias"):
            vectors = list(weights[f"blocks.{number}.modulation.linear.{kind}"].chunk(6))
            for index, gate in ((2, block.gate1), (5, block.gate2)):
                gamma = gate.gamma[:, None] if kind == "weight" else gate.gamma
                vectors[index] = vectors[index] * gamma
            weights[f"blocks.{number}.modulation.linear.{kind}"] = torch.cat(vectors)
    none.load_state_dict({name: t for name, t in weights.items() if "gamma" not in name})
    product.load_state_dict(network("product").state_dict())
    torch.testing.assert_close(prediction(product), prediction(none))
    losses = {}
    for model in (product, none):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
        for _ in range(5):
            optimizer.zero_grad()
            loss = prediction(model).square().mean()
            loss.backward()
            optimizer.step()
        losses[model] = loss.item()
    assert losses[product] != pytest.approx(losses[none], rel=0.01)


def with_sum(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same network as an older version wrote it: a part of the gate's bias is in gamma."""
    generator, old = torch.Generator().manual_seed(0), {k: t.clone() for k, t in weights.items()}
    for name in weights:
        if name.endswith("modulation.linear.bias") and name.startswith("blocks."):
            vectors = old[name].chunk(6)  # views
            for index, gate in ((2, "gate1"), (5, "gate2")):
                gamma = torch.randn(len(vectors[index]), generator=generator)
                gamma = gamma.to(vectors[index].dtype)
                vectors[index].sub_(gamma)
                old[name.replace("modulation.linear.bias", f"{gate}.gamma")] = gamma
    return old


def write_sum(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """A run without gamma, and the same as an older version wrote it with `layer_scale sum`."""
    pair = []
    for _ in range(2):
        folder = tmp_path_factory.mktemp("runs")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(Path(__file__).parents[1])
            run_here(
                "train_sit.py", *TINY, "--steps", 2, "--output-dir", folder,
                "--backbone.recipe.layer-scale", "none",
                "--ema.widths", "0.1", "--ema.snapshot-every", "1",
            )  # fmt: skip
        pair.append(folder / "tiny")
    new, old = pair
    for file in old.rglob("config.yaml"):
        write_sum(file, "layer_scale: none", "layer_scale: sum")
    for file in old.rglob("*.safetensors"):
        tensors = load_file(file)
        if file.stem == "optimizer":
            moments = {f"exp_avg.blocks.0.gate{i}.gamma": torch.ones(16) for i in (1, 2)}
            save_file(tensors | moments, file)
        else:
            save_file(with_sum(tensors), file)
    return new, old


@pytest.mark.parametrize("weights", ["raw", "ema", "ema_0.99", "ema_width_0.1"])
def test_a_checkpoint_of_a_sum_gives_the_same_output(runs, weights):
    new, old = (prediction(open_checkpoint(run).denoiser(weights)) for run in runs)
    torch.testing.assert_close(old, new)
    assert open_checkpoint(runs[1]).config.backbone.recipe.layer_scale == "none"


def test_a_checkpoint_of_a_sum_is_resumed_without_gamma(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    steps = []
    for name, run in zip(("new", "old"), runs, strict=True):
        copy = tmp_path / name / "tiny"
        copy.parent.mkdir()
        shutil.copytree(run, copy)
        run_here("train_sit.py", "--resume", copy, "--steps", "4")
        output = capsys.readouterr().out
        assert ("note: layer_scale sum is read as none" in output) == (name == "old")
        steps.append(open_checkpoint(copy).weights())
    assert steps[0].keys() == steps[1].keys()
    for name, tensor in steps[0].items():
        torch.testing.assert_close(steps[1][name], tensor, msg=name)
    # Its snapshots are of both kinds now.
    for copy in (tmp_path / "new" / "tiny", tmp_path / "old" / "tiny"):
        run_here(POSTHOC, "--run", copy, "--width", "0.12", "--to", copy.parent / "average")
    first, second = (
        open_checkpoint(tmp_path / name / "average").weights("ema") for name in ("new", "old")
    )
    assert first.keys() == second.keys()
    for name, tensor in first.items():  # snapshots are fp16
        torch.testing.assert_close(second[name], tensor, atol=2e-3, rtol=2e-3, msg=name)


@pytest.mark.parametrize("layer_scale", ["none", "product", "instead"])
def test_an_exported_network_predicts_the_same(tmp_path, layer_scale):
    model = network(layer_scale)
    ViT5SiT.from_denoiser(model).save_pretrained(tmp_path)
    assert torch.equal(prediction(ViT5SiT.from_pretrained(tmp_path)), prediction(model))


@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_an_exported_sum_is_read_as_no_gamma(tmp_path, low_cpu_mem_usage):
    model = network("none")
    ViT5SiT.from_denoiser(model).save_pretrained(tmp_path / "old")
    write_sum(tmp_path / "old/config.json", '"layer_scale": "none"', '"layer_scale": "sum"')
    weights = tmp_path / "old/diffusion_pytorch_model.safetensors"
    save_file(with_sum(load_file(weights)), weights, metadata={"format": "pt"})
    again = ViT5SiT.from_pretrained(tmp_path / "old", low_cpu_mem_usage=low_cpu_mem_usage)
    torch.testing.assert_close(prediction(again), prediction(model))
    again.save_pretrained(tmp_path / "new")
    config = json.loads((tmp_path / "new/config.json").read_text())
    assert config["backbone"]["recipe"]["layer_scale"] == "none"


def test_a_classifier_of_a_sum_has_gamma_alone(tmp_path):
    torch.manual_seed(0)
    model = ViT5Classifier(Backbone(32, 2, 2, patch_size=4), image_size=(16, 16), num_classes=5)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    save_classifier(model, tmp_path / "old", source={})
    write_sum(tmp_path / "old/classifier.json", '"layer_scale": "product"', '"layer_scale": "sum"')
    again, images = load_classifier(tmp_path / "old"), torch.randn(2, 3, 16, 16)
    assert again.backbone == model.backbone
    assert torch.equal(again(images), model(images))


@pytest.mark.parametrize("layer_scale", ["product", "instead"])
def test_a_classifier_multiplies_by_gamma_alone(layer_scale):
    recipe = replace(VIT5, layer_scale=layer_scale, layer_scale_init=0.5)
    backbone = Backbone(32, 2, 2, patch_size=4, recipe=recipe)
    torch.manual_seed(0)
    model = ViT5Classifier(backbone, image_size=(16, 16), num_classes=5)
    assert (model.blocks[0].gate1(None) == 0.5).all()
    weights = model.state_dict()
    other = ViT5Classifier(
        replace(backbone, recipe=replace(recipe, layer_scale="product")),
        image_size=(16, 16),
        num_classes=5,
    )
    other.load_state_dict(weights)
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(model(images), other(images))


def test_gamma_in_the_gates_place_leaves_four_vectors():
    model = network("instead")
    assert model.blocks[0].modulation.linear.weight.shape == (4 * 32, 32)
    torch.manual_seed(0)
    fresh = Denoiser(model.backbone, in_channels=1, input_size=(8, 8), num_classes=3)
    x = torch.randn(2, 20, 32)
    rope, c = fresh.rope((4, 4), x.device), torch.randn(2, 32)
    moved = fresh.blocks[0](x, c, rope) - x
    assert 0 < moved.abs().max() < 1e-3  # gamma is 1e-4 at first
    product = Denoiser(
        replace(model.backbone, recipe=VIT5), in_channels=1, input_size=(8, 8), num_classes=3
    )
    assert (product.blocks[0](x, c, rope) == x).all()  # the gate is 0 at first
