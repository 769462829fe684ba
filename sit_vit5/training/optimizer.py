"""AdamW and its learning rate; the state as plain named tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sit_vit5.config import OptimizerConfig
from sit_vit5.errors import UserError
from sit_vit5.training.sharding import cut_like


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW over the trainable fp32 weights."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    low = {p.dtype for p in trainable} - {torch.float32}
    if low:
        raise UserError(f"trainable weights must be fp32, found {low}; use --precision for bf16")
    return torch.optim.AdamW(
        trainable,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up, then constant."""
    return config.lr * min(1.0, (step + 1) / max(config.warmup_steps, 1))


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The state as `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`; empty before the first step."""
    return {
        f"{kind}.{name}": tensor
        for name, parameter in model.named_parameters()
        for kind, tensor in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]
) -> None:
    """Puts back what `optimizer_tensors` gave; every trainable weight must be covered."""
    for name, parameter in model.named_parameters():
        state = {
            kind: tensors[f"{kind}.{name}"]
            for kind in ("step", "exp_avg", "exp_avg_sq")
            if f"{kind}.{name}" in tensors
        }
        fits = [tensor.shape for kind, tensor in state.items() if kind != "step"]
        if parameter.requires_grad and fits != [parameter.shape] * 2:
            raise UserError(f"the checkpoint's optimizer state lacks {name} or has another shape")
        if state:
            optimizer.state[parameter] = {
                kind: tensor.to(parameter.device) if kind == "step" else cut_like(tensor, parameter)
                for kind, tensor in state.items()
            }
