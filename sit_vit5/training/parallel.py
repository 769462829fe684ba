"""FSDP2, and transfers between host and device: sharded tensors and asynchronous scalars.

A shard is torch's DTensor; functions here return plain tensors as they are, so what follows a step
(clipping, EMA, checkpoints) is written once for both. A plain copy from a CUDA device waits for all
queued work; `send` and `AsyncScalar` do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from sit_vit5.models.denoiser import Denoiser

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, behind the work that is queued there."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class AsyncScalar:
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


def shard(model: Denoiser, device: torch.device, processes: int) -> None:
    """Cuts the weights over the processes, in place; a block's are gathered while it works."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (processes,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_sharded(model: nn.Module) -> bool:
    """True after `shard`: the network is then an FSDPModule too."""
    return hasattr(model, "set_requires_gradient_sync")


def local(tensor: Tensor) -> Tensor:
    """This process's part; it shares the memory."""
    return tensor.to_local() if _is_part(tensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """All parts together. Every process must ask."""
    return tensor.full_tensor() if _is_part(tensor) else tensor


def shard_like(tensor: Tensor, part: Tensor) -> Tensor:
    """The part of a whole tensor that belongs to this process, on the device of `part`."""
    tensor = tensor.to(part.device)
    if not _is_part(part):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    # Every process has read the whole tensor: nothing need be sent.
    return distribute_tensor(tensor, part.device_mesh, part.placements, src_data_rank=None)


def shard_all(tensors: dict[str, Tensor], parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """`shard_like` by name."""
    return {name: shard_like(tensor, parts[name]) for name, tensor in tensors.items()}


def _is_part(tensor: Tensor) -> bool:
    """True for a DTensor, which alone has this method."""
    return hasattr(tensor, "full_tensor")


def gradients_stay(accelerator: Accelerator, wrapped: nn.Module) -> AbstractContextManager[None]:
    """A backward pass whose gradients are not averaged over the processes yet."""
    return _unsynced(wrapped) if is_sharded(wrapped) else accelerator.no_sync(wrapped)


@contextmanager
def _unsynced(model: FSDPModule) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


class Staging:
    """Whole tensors copied to the CPU, into memory that the next copies use again.

    keep: whether this process wants them; all must call `copy` for parts to come together.
    """

    def __init__(self, keep: bool):
        self.keep = keep
        self._buffers: dict[str, Tensor] = {}

    def copy(self, group: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of one group's tensors, valid until the group's next copy; {} if not kept."""
        copies = {}
        for name, tensor in tensors.items():
            full = full_tensor(tensor.detach())
            if self.keep:
                buffer = self._buffer(f"{group}/{name}", full)
                copies[name] = buffer.copy_(full, non_blocking=full.is_cuda)
        if self.keep and torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def _buffer(self, key: str, like: Tensor) -> Tensor:
        if key not in self._buffers:
            # Pinned memory is filled at the full speed of the bus.
            self._buffers[key] = torch.empty(
                like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda"
            )
        return self._buffers[key]
