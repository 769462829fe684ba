"""Cost of a model: parameters and FLOPs, counted on the model itself, on the meta device.

FLOPs are 2 x the multiply-adds of matrix products and convolutions, attention included; norms,
activations and sums are not counted. The "Gflops" of the papers on ViT and DiT are multiply-adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sit_vit5.config.presets import Backbone
from sit_vit5.models.classifier import ViT5Classifier
from sit_vit5.models.denoiser import Denoiser


@dataclass(frozen=True)
class Cost:
    """Parameters, and FLOPs of one forward pass of one image."""

    parameters: int
    flops: int


def count_flops(call: Callable[[], object]) -> FlopCounterMode:
    """The counter after a call without gradients; it knows every module's FLOPs by name."""
    # For the meta device: the counter does not know the CPU's fused attention and would miss it.
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter


@cache
def denoiser_cost(
    backbone: Backbone,
    *,
    in_channels: int,
    input_size: tuple[int, int],
    num_classes: int,
    out_channels: int | None = None,
) -> Cost:
    """Cost of the denoiser at latents (in_channels, *input_size)."""

    def build(one_block: Backbone) -> Denoiser:
        return Denoiser(
            one_block,
            in_channels=in_channels,
            input_size=input_size,
            num_classes=num_classes,
            out_channels=out_channels,
        )

    def inputs() -> tuple[Tensor, ...]:
        label = torch.zeros(1, dtype=torch.long)
        return torch.empty(1, in_channels, *input_size), torch.zeros(1), label

    return _cost(backbone, build, inputs)


@cache
def classifier_cost(
    backbone: Backbone, *, image_size: tuple[int, int] = (224, 224), num_classes: int = 1000
) -> Cost:
    """Cost of the classifier at images (3, *image_size)."""

    def build(one_block: Backbone) -> ViT5Classifier:
        return ViT5Classifier(one_block, image_size=image_size, num_classes=num_classes)

    return _cost(backbone, build, lambda: (torch.empty(1, 3, *image_size),))


def _cost(
    backbone: Backbone,
    build: Callable[[Backbone], nn.Module],
    inputs: Callable[[], tuple[Tensor, ...]],
) -> Cost:
    """Counts a model of one block, and that block again for each of the others: they are equal."""
    with torch.device("meta"):  # shapes without numbers
        model = build(replace(backbone, depth=1))
        counter = count_flops(lambda: model(*inputs()))
    block = sum(counter.get_flop_counts()[f"{type(model).__name__}.blocks.0"].values())
    others = backbone.depth - 1
    return Cost(
        _parameters(model) + others * _parameters(model.blocks[0]),
        counter.get_total_flops() + others * block,
    )


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
