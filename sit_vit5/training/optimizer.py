"""Optimizers by name. `build_optimizers` gives those that share the weights of a network.

An optimizer leaves its weights and its state as they are in a step whose `found_inf` is 1. torch's
fused ones and ours read it on the device, without a wait, and say so by torch's own flag
`_step_supports_amp_scaling`; before any other one steps, the trainer waits for the gradient norm.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, distributed, nn

from sit_vit5.config import OptimizerConfig
from sit_vit5.training.parallel import full_tensor, local, shard_like
from sit_vit5.utils.errors import UserError

Named = dict[str, nn.Parameter]

# Coefficients of a x + b x^3 + c x^5, steep at 0 (Jordan et al., 2024: Muon; KellerJordan/Muon).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """U V^T of every matrix U S V^T, roughly: singular values end between 0.7 and 1.2.

    matrices: (..., rows, columns) in the precision of the products. A zero matrix stays zero.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are orthogonalized: W -= lr * 0.2 sqrt(max(rows, columns)) * O.

    The scale gives an update the root mean square of AdamW's, whose learning rate carries over
    (Liu et al., 2025: Muon is scalable for LLM training; torch.optim.Muon's `match_rms_adamw`).
    Parameters of k m rows and m columns, such as qkv and adaLN, hold k square matrices. Processes
    share the work: each orthogonalizes some of the parameters and sends them to the others.

    parameters: of two axes. stacked: those that hold several square matrices.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        parameters: list[nn.Parameter],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        stacked: set[nn.Parameter],
    ):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None
        self.pieces = {p: p.shape[0] // p.shape[1] if p in stacked else 1 for p in parameters}
        self.owners = self._owners()

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        """Update every parameter that has a gradient."""
        del closure
        keep = 1.0 if self.found_inf is None else 1 - self.found_inf
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            momenta = [self._momentum(p, group["momentum"]) for p in parameters]
            for parameter, update in zip(
                parameters, self._orthogonalized(parameters, momenta), strict=True
            ):
                scale = group["lr"] * 0.2 * max(update.shape[-2:]) ** 0.5
                update = local(shard_like(update.reshape(parameter.shape), parameter))
                weights = local(parameter)
                weights.mul_(1 - group["lr"] * group["weight_decay"] * keep)
                weights.sub_(update.to(weights.dtype) * (scale * keep))

    def _momentum(self, parameter: nn.Parameter, beta: float) -> Tensor:
        """Nesterov momentum; the buffer moves towards the gradient unless the step is skipped."""
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        buffer, gradient = local(state["momentum"]), local(parameter.grad)
        if self.found_inf is not None:  # where instead of a product: 0 * NaN is NaN
            gradient = torch.where(self.found_inf.bool(), buffer, gradient)
        buffer.lerp_(gradient, 1 - beta)
        nesterov = torch.empty_like(parameter)
        local(nesterov).copy_(torch.lerp(gradient, buffer, beta))
        return nesterov

    def _orthogonalized(
        self, parameters: list[nn.Parameter], momenta: list[Tensor]
    ) -> list[Tensor]:
        """Updates (pieces, rows, columns), whole and the same on every process."""
        rank, _ = _rank_and_count()
        updates = []
        for parameter, momentum in zip(parameters, momenta, strict=True):
            full, pieces = full_tensor(momentum), self.pieces[parameter]
            matrices = full.reshape(pieces, full.shape[0] // pieces, full.shape[1])
            if matrices.is_cuda:  # the precision of the authors; CPUs multiply fp32 as fast
                matrices = matrices.bfloat16()
            own = self.owners[parameter] == rank
            updates.append(orthogonalize(matrices) if own else torch.empty_like(matrices))
        if _rank_and_count()[1] > 1:
            for parameter, update in zip(parameters, updates, strict=True):
                distributed.broadcast(update, src=self.owners[parameter])
        return updates

    def _owners(self) -> dict[nn.Parameter, int]:
        """The process that orthogonalizes each parameter: largest first, to the least busy."""
        _, count = _rank_and_count()
        busy, owners = [0] * count, {}
        for parameter in sorted(self.pieces, key=_cost, reverse=True):
            owners[parameter] = busy.index(min(busy))
            busy[owners[parameter]] += _cost(parameter)
        return owners


def _cost(parameter: nn.Parameter) -> int:
    """Multiplications of one product of the matrix with its transpose."""
    return parameter.numel() * min(parameter.shape)


def _rank_and_count() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def adamw(named: Named, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Fused AdamW over all weights."""
    return [
        torch.optim.AdamW(
            list(named.values()),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
    ]


def muon(named: Named, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Muon over the matrices of the blocks, fused AdamW over everything else."""
    matrices = {name: p for name, p in named.items() if ".blocks." in f".{name}" and p.ndim == 2}
    stacked = ("qkv.weight", "modulation.linear.weight")
    optimizer = Muon(
        list(matrices.values()),
        lr=config.lr if config.matrix_lr is None else config.matrix_lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        stacked={p for name, p in matrices.items() if name.endswith(stacked)},
    )
    rest = {name: p for name, p in named.items() if name not in matrices}
    return [optimizer, *adamw(rest, config)]


OPTIMIZERS: dict[str, Callable[[Named, OptimizerConfig], list[torch.optim.Optimizer]]] = {
    "adamw": adamw,
    "muon": muon,
}


def build_optimizers(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """The optimizers of all trainable weights, which must be fp32."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    low = {p.dtype for p in named.values()} - {torch.float32}
    if low:
        raise UserError(f"trainable weights must be fp32, found {low}; use --precision for bf16")
    optimizers = OPTIMIZERS[config.name](named, config)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["initial_lr"] = group["lr"]
    return optimizers


def warmup(config: OptimizerConfig, step: int) -> float:
    """Factor of the learning rate at optimizer step `step` (from 0): linear, then 1."""
    return min(1.0, (step + 1) / max(config.warmup_steps, 1))


def optimizer_tensors(
    optimizers: list[torch.optim.Optimizer], model: nn.Module
) -> dict[str, Tensor]:
    """The state as `KIND.NAME`, such as `exp_avg.NAME`; empty before the first step."""
    return {
        f"{kind}.{name}": tensor
        for name, parameter in model.named_parameters()
        for optimizer in optimizers
        for kind, tensor in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    optimizers: list[torch.optim.Optimizer], model: nn.Module, tensors: dict[str, Tensor]
) -> None:
    """Restore what `optimizer_tensors` gave; every trainable weight must be covered."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        states.setdefault(name, {})[kind] = tensor
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kinds = {kind for p in parameters for kind in states.get(names[p], {})}
        for parameter in parameters:
            state = states.get(names[parameter], {})
            fits = all(t.ndim == 0 or t.shape == parameter.shape for t in state.values())
            if not kinds or state.keys() != kinds or not fits:
                raise UserError(
                    f"the checkpoint's optimizer state lacks {names[parameter]} or has another "
                    "shape"
                )
            optimizer.state[parameter] = {
                kind: shard_like(t, parameter) if t.ndim else t.to(parameter.device)
                for kind, t in state.items()
            }
