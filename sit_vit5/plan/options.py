"""Options of `python -m sit_vit5.plan`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import tyro
from annotated_types import Ge, Gt, Le

from sit_vit5.config import TrainConfig
from sit_vit5.errors import choose
from sit_vit5.fields import FilePath, NumClasses, check_values
from sit_vit5.plan.devices import DEVICES, Device


@dataclass(frozen=True)
class PlanCommand:
    """Estimate memory, time and disk of a training run; takes the options of train_sit.py."""

    config: FilePath | None = None
    """YAML file with any of the training options below."""
    gpus: Annotated[int, Ge(1), Le(10**6)] = 8
    """Number of GPUs, one training process each."""
    device: str = "h200"
    """Their kind: h200, h100, a100-80gb, a100-40gb, l40s or rtx4090."""
    utilisation: Annotated[float, Gt(0), Le(1)] = 0.4
    """Share of the peak that training reaches; an assumption, measure yours."""
    tflops_bf16: Annotated[float, Gt(0), Le(1e9)] | None = None
    """Dense bf16 peak of another device, in TFLOPS; None: the device's."""
    tflops_tf32: Annotated[float, Gt(0), Le(1e9)] | None = None
    """Its dense TF32 peak, in TFLOPS; None: the device's."""
    tflops_fp32: Annotated[float, Gt(0), Le(1e9)] | None = None
    """Its fp32 peak without TF32, in TFLOPS; None: the device's."""
    memory_gb: Annotated[float, Gt(0), Le(1e9)] | None = None
    """Its memory in GB (10^9 bytes); None: the device's."""
    classes: NumClasses = 1000
    """Number of classes where the options name no data."""
    train: Annotated[TrainConfig, tyro.conf.arg(name="")] = TrainConfig()

    def __post_init__(self) -> None:
        check_values(self)
        choose("device", self.device, DEVICES)

    def peaks(self) -> Device:
        """The device with what was given in its place."""
        given = {
            "bf16": self.tflops_bf16,
            "tf32": self.tflops_tf32,
            "fp32": self.tflops_fp32,
            "memory_gb": self.memory_gb,
        }
        known = {name: value for name, value in given.items() if value is not None}
        return replace(DEVICES[self.device], **known)
