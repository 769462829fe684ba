"""Peaks of graphics cards, for `--device`. Imports no torch. A new card is one line."""

from __future__ import annotations

from dataclasses import dataclass


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
