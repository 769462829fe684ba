"""Training against released code: the trainer's own step, optimizer and EMA on stored numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from accelerate import Accelerator
from comparison import Check, Tensors
from torch import Tensor

from sit_vit5.codecs.identity import IdentityCodec
from sit_vit5.config import EmaConfig, ObjectiveConfig, OptimizerConfig, TrainConfig, presets
from sit_vit5.data.loader import Batch
from sit_vit5.flow.times import training_interval
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.official import sit_state_dict
from sit_vit5.models.state_dict import fold_gammas
from sit_vit5.training.ema import Ema
from sit_vit5.training.flow_matching import Objective
from sit_vit5.training.stepping import Stepping
from sit_vit5.training.train_state import TrainState
from sit_vit5.utils.distributed import BatchPlan

# Of an official ViT-5: rotary tables, and weights of norms that adaLN scales, which stay 1.
COMPUTED = (".freqs", "norm1.weight", "norm2.weight", "norm_final.weight")


@dataclass(frozen=True)
class Replayed(Objective):
    """The objective with stored draws. inputs: (steps, batch, ...); losses: filled by `loss`."""

    inputs: Tensors
    losses: list[Tensor]

    def loss(self, *args, **kwargs) -> Tensor:
        losses = super().loss(*args, **kwargs)
        self.losses.append(losses.detach())
        return losses

    def _noise(self, step: int, micro: int) -> Tensor:
        return self.inputs["input.noise"][step]

    def _uniform(self, purpose: str, step: int) -> Tensor:
        if purpose != "time":  # the stored labels are dropped already
            return torch.ones(self.plan.batch_size)
        low, high = training_interval(self.config.interpolant, self.config.prediction)
        return ((self.inputs["input.t"][step].double() - low) / (high - low)).float()


def config_of(facts: dict, tensors: Tensors) -> TrainConfig:
    """The fixture's hyperparameters as options."""
    sizes, kind = facts["hyperparameters"], facts["fixture"].removeprefix("trajectory_")
    recipe = presets.RECIPES["SiT"]
    if kind.startswith("vit5"):
        meets = kind.removeprefix("vit5_").split("_")[0]
        recipe = replace(
            presets.RECIPES["ViT5"],
            layer_scale="none" if meets == "sum" else meets,  # see `train`
            registers=tensors["param.reg_token"].shape[1],
        )
    return TrainConfig(
        name="trajectory",
        steps=sizes["steps"],
        batch_size=sizes["batch"],
        precision="fp32",
        backbone=presets.Backbone(
            width=sizes["width"],
            depth=sizes["depth"],
            heads=sizes["heads"],
            patch_size=sizes["patch_size"],
            mlp_ratio=len(tensors["param.blocks.0.mlp.fc1.bias"]) / sizes["width"],
            recipe=recipe,
        ),
        objective=ObjectiveConfig(
            interpolant=sizes["interpolant"].lower(),
            prediction=sizes["prediction"],
            weights=sizes["weight"] or "none",
            weights_bound=None,
        ),
        optimizer=OptimizerConfig(
            lr=sizes["lr"],
            betas=tuple(sizes["betas"]),
            eps=sizes["eps"],
            weight_decay=sizes["weight_decay"],
            clip_norm=0,
        ),
        ema=EmaConfig(decays=(sizes["ema_decay"],), warmup=False),
    )


def our_weights(tensors: Tensors, kind: str, model: Denoiser) -> Tensors:
    """Weights of a kind, param, final or ema, under our names."""
    official = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(f"{kind}.")
        if name == key or name.endswith(COMPUTED):
            continue
        for branch in "12":
            name = name.replace(f".gamma_{branch}", f".gate{branch}.gamma")
        if name == "reg_token":
            name, tensor = "registers", tensor.squeeze(0)
        official[name] = tensor
    return fold_gammas(sit_state_dict(official, model), model.backbone.recipe)


def gate_biases(model: Denoiser) -> list[Tensor]:
    """Views of the adaLN biases of all gates."""
    biases = [block.modulation.linear.bias.data.chunk(6) for block in model.blocks]
    return [vectors[index] for vectors in biases for index in (2, 5)]


def train(facts: dict, tensors: Tensors, learner: TrainState) -> tuple[Tensor, Tensor]:
    """Losses (steps, batch) and gradient norms (steps,) of the trainer's steps.

    A sum, gamma + gate, is trained as none: gamma and the gate's bias have the same gradients, so
    the same moments, and their sum moves twice as far as the bias alone.
    """
    config, model = learner.config, learner.model
    objective = Replayed(
        config.objective, "moments", IdentityCodec(), BatchPlan(config.batch_size), config.seed,
        learner.latent_shape, model.null_label, tensors, [],
    )  # fmt: skip
    steps = Stepping(
        config, learner, objective, accelerator(), model,
        not_finite=lambda data_step: [], say=lambda line: None,
    )  # fmt: skip
    summed, norms = "_sum" in facts["fixture"], []
    for latents, labels in zip(tensors["input.latents"], tensors["input.labels"], strict=True):
        before = [gate.clone() for gate in gate_biases(model)] if summed else []
        steps.train([Batch(latents, labels)])
        if summed:
            for gate, old in zip(gate_biases(model), before, strict=True):
                gate += gate - old
        steps.settle()
        norms.append(steps.grad_norm)
    return torch.stack(objective.losses), torch.tensor(norms)


@cache
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def relative(ours: Tensors, official: Tensors) -> float:
    """L2 norm of all differences over that of all official numbers, in fp64.

    Without the keys' part of a qkv bias: its gradient is 0, of which AdamW makes steps of rounding.
    """
    assert ours.keys() == official.keys()
    difference, norm = 0.0, 0.0
    for name, tensor in official.items():
        expected, replayed = tensor.double(), ours[name].double()
        if name.endswith("qkv.bias"):
            expected, replayed = (torch.cat(bias.chunk(3)[::2]) for bias in (expected, replayed))
        difference += (replayed - expected).square().sum().item()
        norm += expected.square().sum().item()
    return (difference / norm) ** 0.5


def trajectory(facts: dict, tensors: Tensors, folder: Path) -> Iterator[Check]:
    config, sizes = config_of(facts, tensors), facts["hyperparameters"]
    shape = (sizes["in_channels"], sizes["side"], sizes["side"])
    classes = tuple(map(str, range(sizes["classes"])))
    learner = TrainState(config, shape, classes, torch.device("cpu"))
    learner.model.load_state_dict(our_weights(tensors, "param", learner.model))
    learner.ema = Ema(learner.model, config.ema)
    losses, norms = train(facts, tensors, learner)
    tolerance = facts["tolerance"]
    if "_sit" in facts["fixture"]:  # without the keys' bias, see `relative`
        tolerance = {name: min(limit, 1e-5) for name, limit in tolerance.items()}
    yield Check(
        "losses", relative({"": losses}, {"": tensors["output.losses"]}), tolerance["losses"]
    )
    if "_sum" not in facts["fixture"]:  # whose gradient holds gamma's too
        expected = tensors["output.grad_norm"].flatten()
        yield Check("gradient norms", relative({"": norms}, {"": expected}), tolerance["losses"])
    for kind, weights, name in (("final", "raw", "weights"), ("ema", config.ema.slowest, "ema")):
        official = our_weights(tensors, kind, learner.model)
        yield Check(name, relative(learner.weights(weights), official), tolerance[name])
