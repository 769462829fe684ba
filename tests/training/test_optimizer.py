"""Optimizers: AdamW's options, Muon against its reference, and their state in checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sit_vit5.config import OptimizerConfig, presets
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.training.optimizer import (
    Muon,
    build_optimizers,
    load_optimizer_tensors,
    optimizer_tensors,
    orthogonalize,
    warmup,
)
from sit_vit5.utils.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden" / "muon.safetensors"
SHAPES = ((64, 64), (192, 64), (64, 256))


def muon(weight: nn.Parameter, *, stacked: bool = False, **options) -> Muon:
    options = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.0} | options
    return Muon([weight], stacked={weight} if stacked else set(), **options)


def denoiser() -> Denoiser:
    torch.manual_seed(0)
    backbone = presets.backbone("ViT5-Nano/2")
    return Denoiser(backbone, in_channels=1, input_size=(4, 4), num_classes=2)


def test_learning_rate_rises_linearly_and_stays():
    config = OptimizerConfig(warmup_steps=4)
    assert [warmup(config, step) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert warmup(OptimizerConfig(lr=0.5), 0) == 1


def test_optimizer_state_survives_a_round_trip_to_the_bit():
    def step(model, optimizer, value):
        (model(torch.ones(1, 3)) * value).square().sum().backward()
        (only,) = optimizer
        only.step()
        only.zero_grad()

    torch.manual_seed(0)
    first, config = nn.Linear(3, 3), OptimizerConfig(lr=0.1)
    optimizer = build_optimizers(first, config)
    step(first, optimizer, 2.0)
    second = nn.Linear(3, 3)
    second.load_state_dict(first.state_dict())
    other = build_optimizers(second, config)
    tensors = {k: t.clone() for k, t in optimizer_tensors(optimizer, first).items()}
    load_optimizer_tensors(other, second, tensors)
    step(first, optimizer, 3.0)
    step(second, other, 3.0)
    assert (first.weight == second.weight).all()
    del tensors["exp_avg.weight"]
    with pytest.raises(UserError, match="lacks weight"):
        load_optimizer_tensors(other, second, tensors)
    with pytest.raises(UserError, match="lacks (weight|bias)"):
        load_optimizer_tensors(other, second, {})


def test_betas_eps_and_weight_decay_reach_the_optimizer():
    config = OptimizerConfig(lr=0.3, betas=(0.5, 0.6), eps=0.1, weight_decay=0.2)
    (optimizer,) = build_optimizers(nn.Linear(2, 2), config)
    (group,) = optimizer.param_groups
    found = (group["lr"], group["betas"], group["eps"], group["weight_decay"])
    assert found == (0.3, (0.5, 0.6), 0.1, 0.2)


def test_low_precision_master_weights_are_refused():
    with pytest.raises(UserError, match="must be fp32"):
        build_optimizers(nn.Linear(2, 2).bfloat16(), OptimizerConfig())


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalize_equals_the_reference(shape):
    golden, name = load_file(GOLDEN), "x".join(map(str, shape))
    exact = golden[f"{name}.fp32"]
    torch.testing.assert_close(orthogonalize(golden[f"{name}.gradient"]), exact, atol=1e-5, rtol=0)
    low = orthogonalize(golden[f"{name}.gradient"].bfloat16())
    torch.testing.assert_close(low, golden[f"{name}.bf16"], atol=0.02, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_muon_takes_the_reference_update_direction(shape):
    golden, name = load_file(GOLDEN), "x".join(map(str, shape))
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = muon(weight, lr=1.0)
    for gradient in (golden[f"{name}.gradient"], golden[f"{name}.gradient2"]):
        weight.data.zero_()
        weight.grad = gradient
        optimizer.step()
    ours = -weight.detach() / (0.2 * max(shape) ** 0.5)
    reference = golden[f"{name}.update2"].float() / max(1, shape[0] / shape[1]) ** 0.5
    torch.testing.assert_close(ours, reference, atol=0.02, rtol=0)  # the reference rounds to bf16


def test_muon_equals_torchs_in_ten_steps():
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.zeros(64, 32)) for _ in range(2))
    peer = torch.optim.Muon([theirs], lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    optimizer = muon(ours, weight_decay=0.1)
    for _ in range(10):
        ours.grad = torch.randn(64, 32)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        peer.step()
    assert (ours - theirs).norm() < 0.02 * theirs.norm()  # torch multiplies in bf16


@pytest.mark.parametrize("condition", [1, 10, 100])
def test_orthogonalize_brings_singular_values_near_one(condition):
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(48, 48, dtype=torch.float64))[0] for _ in range(2))
    singular = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), 48).double()
    values = torch.linalg.svdvals(orthogonalize(u * singular @ v.mT))
    assert values.min() > 0.65 and values.max() < 1.25


def test_muon_treats_stacked_matrices_one_by_one():
    torch.manual_seed(0)
    gradient = torch.randn(24, 8)
    whole = nn.Parameter(torch.zeros(24, 8))
    parts = [nn.Parameter(torch.zeros(8, 8)) for _ in range(3)]
    whole.grad = gradient
    muon(whole, stacked=True).step()
    for part, piece in zip(parts, gradient.chunk(3), strict=True):
        part.grad = piece
        muon(part).step()
    torch.testing.assert_close(whole.detach(), torch.cat([p.detach() for p in parts]))


def test_muon_leaves_all_as_it_was_on_a_nan_gradient():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8))
    optimizer = muon(weight, weight_decay=0.1)
    weight.grad = torch.randn(8, 8)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    before, momentum = weight.detach().clone(), optimizer.state[weight]["momentum"].clone()
    weight.grad = torch.full((8, 8), float("nan"))
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert torch.equal(weight, before)
    assert torch.equal(optimizer.state[weight]["momentum"], momentum)


def test_muon_gets_the_blocks_matrices_and_adamw_the_rest():
    network = denoiser()
    muons, adamw = build_optimizers(network, OptimizerConfig(name="muon", matrix_lr=0.5))
    names = {parameter: name for name, parameter in network.named_parameters()}
    matrices = {names[p]: pieces for p, pieces in muons.pieces.items()}
    assert {name.removeprefix("blocks.0.") for name in matrices if ".0." in name} == {
        "attention.qkv.weight", "attention.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight",
        "modulation.linear.weight",
    }  # fmt: skip
    assert matrices["blocks.0.attention.qkv.weight"] == 3
    assert matrices["blocks.0.modulation.linear.weight"] == 6
    assert matrices["blocks.0.mlp.fc1.weight"] == 1
    rest = [names[p] for p in adamw.param_groups[0]["params"]]
    assert sorted([*matrices, *rest]) == sorted(
        name for name, p in network.named_parameters() if p.requires_grad
    )
    assert muons.param_groups[0]["lr"] == 0.5 and adamw.param_groups[0]["lr"] == 1e-4


def test_muons_state_survives_a_round_trip_to_the_bit():
    def train(network, optimizers, value):
        for parameter in network.parameters():
            parameter.grad = torch.full_like(parameter, value) * parameter.detach().cos()
        for optimizer in optimizers:
            optimizer.step()

    config = OptimizerConfig(name="muon", lr=0.01)
    first, second = denoiser(), denoiser()
    optimizers, others = (build_optimizers(network, config) for network in (first, second))
    train(first, optimizers, 1.0)
    second.load_state_dict(first.state_dict())
    tensors = {key: t.clone() for key, t in optimizer_tensors(optimizers, first).items()}
    load_optimizer_tensors(others, second, tensors)
    train(first, optimizers, -0.5)
    train(second, others, -0.5)
    for key, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[key]), key
