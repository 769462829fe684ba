"""Moving averages of the weights, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from sit_vit5.config import EmaConfig, decay_name, width_name
from sit_vit5.models.state_dict import check_tensors
from sit_vit5.training.parallel import local, shard_like
from sit_vit5.utils import power_ema as power_average

# The decay at an optimizer step (from 0).
Rule = Callable[[int], float]


class Ema:
    """One average per decay and width. Floating-point tensors are averaged, all others copied.

    After step k: average = d * average + (1 - d) * weights, d as the average's rule says. A step
    that the watchdog skipped is not counted: it leaves the averages alone. Where the model is cut
    over processes, so are they.
    """

    def __init__(self, model: nn.Module, config: EmaConfig):
        self.config, self.rules = config, rules(config)
        self.averages = {
            name: _copy(model.state_dict(), on_host=config.device == "host") for name in self.rules
        }

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Moves every average towards the weights after optimizer step `step` (from 0)."""
        weights = model.state_dict()
        floats = [name for name, tensor in weights.items() if tensor.is_floating_point()]
        moved = [local(weights[name]).float() for name in floats]
        if self.config.device == "host":  # once for all averages: it is the step's costly part
            moved = [tensor.cpu() for tensor in moved]
        for rule_name, average in self.averages.items():
            if weights.keys() != average.keys():
                odd = sorted(weights.keys() ^ average.keys())[:3]
                raise RuntimeError(f"averages and weights have different names: {odd}")
            averaged = [local(average[name]) for name in floats]
            torch._foreach_lerp_(averaged, moved, 1 - self.rules[rule_name](step))
            for name in average.keys() - set(floats):
                average[name].copy_(weights[name])

    def young(self, step: int) -> list[float]:
        """Decays without warm-up whose average still holds initial weights: step < 1 / (1 - d)."""
        if self.config.warmup:
            return []
        return [decay for decay in self.config.decays if step < 1 / (1 - decay)]

    def load(self, averages: dict[str, dict[str, Tensor]], source: Path) -> None:
        """Takes averages from a checkpoint; rules, names and shapes must be the same."""
        for rule_name, average in self.averages.items():
            check_tensors(averages[rule_name], average, source)
            for name, tensor in average.items():
                tensor.copy_(shard_like(averages[rule_name][name], tensor))


def rules(config: EmaConfig) -> dict[str, Rule]:
    """The rule of every average by its name."""
    rule = _warmed_up if config.warmup else _constant
    found: dict[str, Rule] = {decay_name(decay): partial(rule, decay) for decay in config.decays}
    for width in config.widths:
        found[width_name(width)] = partial(power_average.decay_at, power_average.shape_of(width))
    return found


def _constant(decay: float, step: int) -> float:
    return decay


def _warmed_up(decay: float, step: int) -> float:
    return min(decay, (1 + step) / (10 + step))


def _copy(weights: dict[str, Tensor], *, on_host: bool) -> dict[str, Tensor]:
    copies = {
        name: (tensor.detach().float() if tensor.is_floating_point() else tensor).clone()
        for name, tensor in weights.items()
    }
    return {name: copy.cpu() for name, copy in copies.items()} if on_host else copies
