"""One comparison with an official number."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Check:
    """One comparison: it passes where error <= tolerance."""

    name: str
    error: float
    tolerance: float


def difference(ours: Tensor, official: Tensor) -> float:
    """Largest absolute difference in fp64; infinite if the shapes differ."""
    if ours.shape != official.shape:
        return float("inf")
    return (ours.double() - official.double()).abs().max().item()
