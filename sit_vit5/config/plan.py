"""Options of the planner, and the devices that it knows. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import tyro
from annotated_types import Ge, Gt, Le

from sit_vit5.config import TrainConfig
from sit_vit5.config.fields import FilePath, NumClasses, check_values
from sit_vit5.utils.errors import choose


@dataclass(frozen=True)
class Device:
    """What the vendor promises, dense: without structured sparsity.

    bf16, tf32: TFLOPS of tensor cores with fp32 sums. fp32: TFLOPS outside the tensor cores, since
    TF32 is off but for precision tf32. memory_gb: as sold, read as 10^9 bytes; a little more may be
    there.
    """

    bf16: float
    tf32: float
    fp32: float
    memory_gb: float


DEVICES: dict[str, Device] = {
    # NVIDIA H200 and H100 data sheets, SXM: 1,979 TFLOPS bf16 "with sparsity", dense is half.
    "h200": Device(bf16=989.5, tf32=494.5, fp32=67, memory_gb=141),
    "h100": Device(bf16=989.5, tf32=494.5, fp32=67, memory_gb=80),
    # NVIDIA A100 data sheet, SXM and PCIe alike.
    "a100-80gb": Device(bf16=312, tf32=156, fp32=19.5, memory_gb=80),
    "a100-40gb": Device(bf16=312, tf32=156, fp32=19.5, memory_gb=40),
    # NVIDIA L40S data sheet.
    "l40s": Device(bf16=362.05, tf32=183, fp32=91.6, memory_gb=48),
    # NVIDIA Ada GPU architecture, appendix A: GeForce RTX 4090, bf16 with fp32 sums.
    "rtx4090": Device(bf16=165.2, tf32=82.6, fp32=82.6, memory_gb=24),
}


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
