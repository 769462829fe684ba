"""Memory of a training step, counted by running it on fake tensors: shapes without numbers.

The real model runs, forward and backward, so whatever it does is counted. Fake tensors say that
they are on the CPU, whose fused attention keeps what the GPU's keeps: queries, keys, values, output
and one sum per row.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sit_vit5.models.denoiser import Denoiser
from sit_vit5.precision import autocast


class LiveMemory(TorchDispatchMode):
    """Bytes of what operations made and what still lives: now, and at most so far.

    known: tensors that were there before and are not counted.
    """

    def __init__(self, known: Iterable[Tensor]):
        super().__init__()
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.now += size
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch beyond weights, gradients and optimizer state.

    weight_copies: what does not grow with the batch, the bf16 weights under autocast; kept: what
    the forward pass keeps for the backward pass; working: what the step needs on top at its peak.
    """

    weight_copies: int
    kept: int
    working: int


def activations(
    build: Callable[[], Denoiser],
    latent_shape: tuple[int, int, int],
    *,
    micro_batch_size: int,
    precision: str,
) -> Activations:
    """Bytes of a training step of the denoiser that `build` makes."""
    with FakeTensorMode():
        model = build()
        once = _step(model, latent_shape, micro_batch_size, precision)
        twice = _step(model, latent_shape, 2 * micro_batch_size, precision)
    copies = 2 * once.now - twice.now
    return Activations(copies, once.now - copies, once.peak - once.now)


@dataclass(frozen=True)
class _Measured:
    now: int
    peak: int


def _step(
    model: Denoiser, latent_shape: tuple[int, int, int], batch: int, precision: str
) -> _Measured:
    """Live bytes after forward, and at the peak of forward and backward."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    with LiveMemory([*model.parameters(), *gradients]) as memory:
        x_t, t = torch.empty(batch, *latent_shape), torch.empty(batch)
        labels = torch.zeros(batch, dtype=torch.long)
        with autocast(x_t.device, precision):
            prediction = model(x_t, t, labels)
        loss = prediction.square().mean()
        kept = memory.now
        del prediction
        loss.backward()
    return _Measured(kept, memory.peak)


def call_peak(module: nn.Module, call: Callable[[], object]) -> int:
    """Largest number of live bytes during a call without gradients; inside a FakeTensorMode."""
    with LiveMemory([*module.parameters(), *module.buffers()]) as memory, torch.no_grad():
        call()
    return memory.peak
