"""Network, optimizer and averages: what a training step changes and a checkpoint holds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sit_vit5.checkpoint import Checkpoint
from sit_vit5.config import TrainConfig
from sit_vit5.errors import UserError
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.layers import set_attention
from sit_vit5.models.state_dict import load_weights
from sit_vit5.training.ema import Ema
from sit_vit5.training.init_from import init_from
from sit_vit5.training.optimizer import (
    build_optimizer,
    learning_rate,
    load_optimizer_tensors,
    optimizer_tensors,
)


def check_compiler(device: torch.device) -> None:
    """On the CPU torch.compile needs a C++ compiler; says so before the first step."""
    if device.type != "cpu":
        return
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        raise UserError(
            "--compile needs a C++ compiler such as g++ on the CPU; install one or drop it"
        ) from None


def compiles(config: TrainConfig, device: torch.device) -> bool:
    """Whether blocks are compiled: as configured, else where there is CUDA."""
    return device.type == "cuda" if config.compile is None else config.compile


class Learner:
    """Fresh from the seed; `restore` continues a run, `init_from` borrows weights for a new one.

    latent_shape: (c, h, w) of one sample; class_names: empty for an unconditional model.
    """

    def __init__(
        self,
        config: TrainConfig,
        latent_shape: tuple[int, int, int],
        class_names: tuple[str, ...],
        device: torch.device,
    ):
        self.config, self.device = config, device
        self.latent_shape, self.class_names = latent_shape, class_names
        torch.manual_seed(config.seed)  # initial weights only; everything else is keyed
        self.model = self._network()
        self.model.recompute = config.recompute
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.ema = Ema(self.model, config.ema)
        self._seen: dict[str, Tensor] = {}
        if compiles(config, device):
            check_compiler(device)
            for block in self.model.blocks:
                block.compile(dynamic=False)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Takes everything from a checkpoint; a missing tensor is an error."""
        load_weights(self.model, checkpoint.weights(), checkpoint.folder)
        self.optimizer.state.clear()
        if checkpoint.state.step > checkpoint.state.skipped_steps:  # else no step was taken yet
            load_optimizer_tensors(self.optimizer, self.model, checkpoint.optimizer())
        averages = {name: checkpoint.weights(name) for name in self.config.ema.names}
        self.ema.load(averages, checkpoint.folder)

    def init_from(self, path: str) -> list[str]:
        """Takes the weights behind a path that fit; lines that say what was taken and what not."""
        lines = init_from(self.model, path, self.class_names)
        self.ema = Ema(self.model, self.config.ema)
        return lines

    def update(self, step: int, *, limit: float = math.inf) -> Tensor:
        """Clips the gradients and takes one optimizer step; their norm before, on the device.

        If that is not finite or above the limit, nothing changes. The optimizer looks at it on its
        own device, so that the host need not wait for it.
        """
        config = self.config.optimizer
        clip = config.clip_norm or math.inf
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        # Read by torch's fused optimizers, as gradient scalers use it: 1 leaves all as it was.
        counts = grad_norm.isfinite() & (grad_norm <= limit)
        self.optimizer.found_inf = (~counts).float()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def average(self, step: int) -> None:
        """Moves the averages towards the weights that step `step` left."""
        self.ema.update(self.model, step)

    def still_averages(self) -> list[str]:
        """Names of the averages that have not moved since the last call, though the weights have.

        Only the last weight is looked at.
        """
        name = list(self.model.state_dict())[-1]
        now = {"": self.model.state_dict()[name].clone()}
        now |= {key: average[name].clone() for key, average in self.ema.averages.items()}
        before, self._seen = self._seen, now
        moved = {key for key in before if not torch.equal(before[key], now[key])}
        return [key for key in self.ema.averages if before and "" in moved and key not in moved]

    def finite(self) -> bool:
        """Whether all weights are finite: an update may break what its gradient did not show."""
        norms = torch._foreach_norm(list(self.model.parameters()))
        return bool(torch.stack(norms).isfinite().all())

    def networks(self) -> dict[str, Denoiser]:
        """Copies with raw and averaged weights: drawing cannot touch the ones in training."""
        weights = {"raw": self.model.state_dict()}
        for name, average in self.ema.averages.items():
            weights[name.replace("ema_", "EMA ").replace("_", " ")] = average
        copies = {}
        for name, tensors in weights.items():
            copies[name] = self._network()
            copies[name].load_state_dict(tensors)
            copies[name].eval().requires_grad_(False)
        return copies

    def tensors(self) -> dict[str, dict]:
        """What `save_checkpoint` writes."""
        return {
            "model": self.model.state_dict(),
            "averages": self.ema.averages,
            "optimizer": optimizer_tensors(self.optimizer, self.model),
        }

    def _network(self) -> Denoiser:
        model = Denoiser(
            self.config.backbone,
            in_channels=self.latent_shape[0],
            input_size=self.latent_shape[1:],
            num_classes=len(self.class_names),
        )
        set_attention(model, self.config.attention)
        return model.to(self.device)
