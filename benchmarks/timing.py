"""What the benchmarks measure with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def medians(runs: list[Callable[[], object]], *, repeats: int, device: str) -> list[float]:
    """Median seconds of each call; the calls take turns, so that a slow minute hits all."""
    taken = [[] for _ in runs]
    for repeat in range(repeats + 2):  # the first two warm up
        for run, times in zip(runs, taken, strict=True):
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            if repeat > 1:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def matmul_peak(device: str, precision: str) -> float:
    """FLOPS of a large square matrix product, the best of twelve."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(4096, 4096, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(12):
        synchronize(device)
        start = time.perf_counter()
        a @ b
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * 4096**3 / min(times)


def synchronize(device: str) -> None:
    """Waits for the device: launches return before the work is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
