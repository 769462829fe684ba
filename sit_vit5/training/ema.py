"""Exponential moving averages of the weights, in fp32."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from sit_vit5.models.state_dict import check_tensors


class Ema:
    """One average per decay. Floating-point tensors are averaged, all others copied.

    After step k: average = d * average + (1 - d) * weights with d = min(decay, (1 + k) / (10 + k))
    where warm-up is on, k counting from 0.
    """

    def __init__(self, model: nn.Module, decays: tuple[float, ...], *, warmup: bool):
        self.decays, self.warmup = decays, warmup
        self.averages = {decay: _copy(model.state_dict()) for decay in decays}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Moves every average towards the weights after optimizer step `step` (from 0)."""
        weights = model.state_dict()
        for decay, average in self.averages.items():
            if weights.keys() != average.keys():
                odd = sorted(weights.keys() ^ average.keys())[:3]
                raise RuntimeError(f"averages and weights have different names: {odd}")
            used = self.decay_at(decay, step)
            floats = [name for name in average if average[name].is_floating_point()]
            torch._foreach_lerp_(
                [average[name] for name in floats],
                [weights[name].float() for name in floats],
                1 - used,
            )
            for name in average.keys() - set(floats):
                average[name].copy_(weights[name])

    def decay_at(self, decay: float, step: int) -> float:
        """The decay used at a step."""
        return min(decay, (1 + step) / (10 + step)) if self.warmup else decay

    def young(self, step: int) -> list[float]:
        """Decays without warm-up whose average still holds initial weights: step < 1 / (1 - d)."""
        return [] if self.warmup else [decay for decay in self.decays if step < 1 / (1 - decay)]

    def load(self, averages: dict[float, dict[str, Tensor]], source: Path) -> None:
        """Takes averages from a checkpoint; decays, names and shapes must be the same."""
        for decay, average in self.averages.items():
            check_tensors(averages[decay], average, source)
            for name, tensor in average.items():
                tensor.copy_(averages[decay][name])


def _copy(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: (tensor.detach().float() if tensor.is_floating_point() else tensor).clone()
        for name, tensor in weights.items()
    }
