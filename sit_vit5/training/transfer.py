"""Numbers between host and device without a wait for the work that is queued there.

On CUDA a plain copy waits for everything queued before it, forward and backward passes included;
the device would then stand still until the host has queued more.
"""

from __future__ import annotations

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, behind the work that is queued there."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Arriving:
    """A number on its way from the device; as a float it waits for what computes it, not for what
    was queued later."""

    def __init__(self, number: Tensor):
        # Other devices' copies have no event of their own to wait for: they are made when asked.
        self._number = number.to("cpu", non_blocking=True) if number.is_cuda else number
        self._arrived = None
        if number.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def __float__(self) -> float:
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._number)
