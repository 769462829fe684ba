"""Network, optimizer and EMA weights: the state that a step changes and a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sit_vit5.config import TrainConfig
from sit_vit5.models.checkpoint import Checkpoint
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.layers import set_attention
from sit_vit5.models.state_dict import check_tensors
from sit_vit5.training import parallel as sharding
from sit_vit5.training.ema import Ema
from sit_vit5.training.init_from import init_from
from sit_vit5.training.optimizer import (
    build_optimizers,
    load_optimizer_tensors,
    optimizer_tensors,
    warmup,
)
from sit_vit5.utils.errors import UserError


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
    """True if blocks are compiled: as configured, else on CUDA."""
    return device.type == "cuda" if config.compile is None else config.compile


class TrainState:
    """Fresh from the seed; `restore` continues a run, `init_from` borrows weights for a new one.

    latent_shape: (c, h, w) of one sample; class_names: empty for an unconditional model; shard:
    cuts the network in place, before anything is built on its weights.
    """

    def __init__(
        self,
        config: TrainConfig,
        latent_shape: tuple[int, int, int],
        class_names: tuple[str, ...],
        device: torch.device,
        *,
        shard: Callable[[Denoiser], None] | None = None,
    ):
        self.config, self.device = config, device
        self.latent_shape, self.class_names = latent_shape, class_names
        torch.manual_seed(config.seed)  # initial weights only; everything else is keyed
        self.model = self._network()
        self.model.activation_checkpointing = config.activation_checkpointing
        if compiles(config, device):
            check_compiler(device)
            for block in self.model.blocks:
                block.compile(dynamic=False)
        if shard is not None:
            shard(self.model)
        self.optimizers = build_optimizers(self.model, config.optimizer)
        self.ema = Ema(self.model, config.ema)
        self._seen: dict[str, Tensor] = {}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Takes everything from a checkpoint; a missing tensor is an error."""
        weights = checkpoint.weights()
        check_tensors(weights, self.model.state_dict(), checkpoint.folder)
        self._load(weights)
        for optimizer in self.optimizers:
            optimizer.state.clear()
        if checkpoint.state.step > checkpoint.state.skipped_steps:  # else no step was taken yet
            load_optimizer_tensors(self.optimizers, self.model, checkpoint.optimizer())
        averages = {name: checkpoint.weights(name) for name in self.config.ema.names}
        self.ema.load(averages, checkpoint.folder)

    def init_from(self, path: str | None) -> list[str]:
        """Takes the weights behind a path that fit; lines that say what was taken and what not."""
        if path is None:
            return []
        taken, lines = init_from(self.model, path, self.class_names)
        self._load(taken)
        self.ema = Ema(self.model, self.config.ema)
        return lines

    def _load(self, weights: dict[str, Tensor]) -> None:
        """Puts whole weights in place of those of the same names."""
        own = self.model.state_dict()
        self.model.load_state_dict(own | sharding.shard_all(weights, own))

    def update(self, step: int, *, limit: float = math.inf) -> Tensor:
        """Clips the gradients and takes one optimizer step; their norm before, on the device.

        If that is not finite or above the limit, nothing changes. The optimizer looks at it on its
        own device, so that the host need not wait for it.
        """
        config = self.config.optimizer
        clip = config.clip_norm or math.inf
        grad_norm = sharding.full_tensor(
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        )
        counts = grad_norm.isfinite() & (grad_norm <= limit)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * warmup(config, step)
            # Read as by gradient scalers, on the device; others cannot skip a step by themselves.
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.found_inf = (~counts).float()
            elif not counts:
                continue
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return grad_norm

    def average(self, step: int) -> None:
        """Moves the averages towards the weights that step `step` left."""
        self.ema.update(self.model, step)

    def still_averages(self) -> list[str]:
        """Names of the averages that have not moved since the last call, though the weights have.

        Only the last weight is looked at.
        """
        name = list(self.model.state_dict())[-1]
        last = {"": self.model.state_dict()[name]}
        last |= {key: average[name] for key, average in self.ema.averages.items()}
        now = {key: sharding.local(tensor).clone() for key, tensor in last.items()}
        before, self._seen = self._seen, now
        moved = {key for key in before if not torch.equal(before[key], now[key])}
        return [key for key in self.ema.averages if before and "" in moved and key not in moved]

    def finite(self) -> bool:
        """True if all weights of this process are finite: an update may break what its gradient
        did not show."""
        norms = torch._foreach_norm([sharding.local(p.detach()) for p in self.model.parameters()])
        return bool(torch.stack(norms).isfinite().all())

    def weights(self, name: str) -> dict[str, Tensor]:
        """The weights in training, `raw`, or an average, by its name; cut, if the model is."""
        return self.model.state_dict() if name == "raw" else self.ema.averages[name]

    @torch.no_grad()
    def copy(self, name: str, *, keep: bool = True) -> Denoiser | None:
        """A network of its own with these weights; None if this process keeps none.

        Where the model is cut, all must ask: tensor by tensor its parts come together.
        """
        copy = self._network() if keep else None
        own = copy.state_dict() if keep else {}
        for key, tensor in self.weights(name).items():
            full = sharding.full_tensor(tensor)
            if keep:
                own[key].copy_(full)
        return copy.eval().requires_grad_(False) if keep else None

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Tensors of a checkpoint by the name of their file; sharded if the model is."""
        return {
            **{name: self.weights(name) for name in ("raw", *self.ema.averages)},
            "optimizer": optimizer_tensors(self.optimizers, self.model),
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
