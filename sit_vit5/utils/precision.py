"""Precision of matrix products, owned by the configuration and by nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from sit_vit5.utils.errors import UserError


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """Matrix products in bf16 inside the context; nothing changes for fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """bf16 as fp32; fp32 and fp64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def no_autocast(device: torch.device) -> AbstractContextManager:
    """Operations keep their inputs' precision inside; the meta device has no autocast to stop."""
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def set_tf32(enabled: bool) -> None:
    """Switches TF32 of matrix products and convolutions explicitly: defaults vary by version."""
    torch.backends.cuda.matmul.allow_tf32 = enabled
    torch.backends.cudnn.allow_tf32 = enabled


@contextmanager
def tf32_off() -> Iterator[None]:
    """TF32 off inside the context, and as it was after it: for a library called by others."""
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [switch.allow_tf32 for switch in switches]
    set_tf32(False)
    try:
        yield
    finally:
        for switch, allowed in zip(switches, before, strict=True):
            switch.allow_tf32 = allowed


def set_precision(precision: str, device: torch.device) -> None:
    """Switch TF32 on for tf32 and off for everything else; refuse tf32 where there is none."""
    if precision == "tf32" and device.type != "cuda":
        raise UserError(f"precision tf32 is CUDA's, the device is {device}; use fp32 or bf16")
    set_tf32(precision == "tf32")


def check_launcher(precision: str) -> None:
    """Refuses a launcher whose --mixed_precision says something else than the configuration."""
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", "bf16" if precision == "bf16" else "no"):
        raise UserError(
            f"accelerate launch says mixed_precision {launched}, the configuration says precision "
            f"{precision}; drop the launcher's flag and use --precision"
        )
