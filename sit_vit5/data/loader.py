"""The step-addressable loader: which image stands where is a function of (seed, position).

Position p = step * batch_size + place in the batch. Epoch e holds positions e * n .. e * n + n - 1
and its own permutation, so a resumed run asks for the next step and nothing is replayed or
skipped, whatever the number of processes, workers or accumulation steps.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sit_vit5 import rng
from sit_vit5.data import Source
from sit_vit5.data.images import BadImage
from sit_vit5.distributed import BatchPlan
from sit_vit5.errors import UserError


@dataclass(frozen=True)
class Batch:
    """One micro-batch. images: fp32 (b, C, H, W) in [-1, 1], or latents; labels: int64 (b,)."""

    images: Tensor
    labels: Tensor
    bad_images: tuple[str, ...] = ()

    def pin_memory(self) -> Batch:
        """Called by DataLoader where there is a GPU: pinned images travel beside the work."""
        return replace(self, images=self.images.pin_memory(), labels=self.labels.pin_memory())


class StepLoader(Dataset):
    """Micro-batches by (step, micro), alone or as an endless prefetched stream."""

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        *,
        seed: int,
        horizontal_flip: bool = False,
        on_bad_image: str = "error",
        workers: int = 0,
    ):
        if len(source) < plan.batch_size:
            raise UserError(
                f"{len(source)} images are fewer than batch_size {plan.batch_size}; "
                "lower batch_size or add images"
            )
        self.source, self.plan, self.seed = source, plan, seed
        self.horizontal_flip, self.skip_bad = horizontal_flip, on_bad_image == "skip"
        self.workers = workers
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key != "_order"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._order = lru_cache(maxsize=2)(self._permutation)

    def index(self, position: int) -> int:
        """Index in the source of the image at a position of the endless order."""
        epoch, place = divmod(position, len(self.source))
        return int(self._order(epoch)[place])

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        """Micro-batch `micro` of this rank at `step`; key = (step, micro)."""
        step, micro = key
        places = self.plan.indices(micro)
        flips = self._flips(step)
        items, labels, bad = [], [], []
        for place in places:
            index = self.index(step * self.plan.batch_size + place)
            item, label = self._load(index, bool(flips[place]), bad)
            items.append(item)
            labels.append(label)
        return Batch(self._to_tensor(np.stack(items)), torch.tensor(labels), tuple(bad))

    def steps(self, first_step: int) -> Iterator[list[Batch]]:
        """The micro-batches of first_step, first_step + 1, ... without end, read ahead."""
        stream = DataLoader(
            _ErrorsAsValues(self),
            sampler=_keys(first_step, self.plan.accumulation),
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=4 if self.workers else None,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_stand_apart,
        )
        micro_batches = iter(stream)
        try:
            while True:
                step = [next(micro_batches) for _ in range(self.plan.accumulation)]
                for batch in step:
                    if isinstance(batch, UserError):
                        raise batch
                yield step
        except (RuntimeError, ConnectionError, EOFError) as error:
            # A killed worker: DataLoader's own word, or a pipe that broke while it was read.
            if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker"):
                raise  # a bug keeps its traceback
            raise UserError(
                f"a loader process died: {' '.join(str(error).split())}; use fewer --data.workers"
            ) from None
        finally:
            del micro_batches  # ends the workers now; a kept traceback would keep them alive

    def _permutation(self, epoch: int) -> np.ndarray:
        return rng.generator(self.seed, "order", epoch).permutation(len(self.source))

    def _flips(self, step: int) -> np.ndarray:
        if not self.horizontal_flip:
            return np.zeros(self.plan.batch_size, bool)
        return rng.uniform(self.seed, "flip", self.plan.batch_size, step=step) < 0.5

    def _load(self, index: int, mirror: bool, bad: list[str]) -> tuple[np.ndarray, int]:
        """The item at index, or the next that can be decoded where bad images are skipped."""
        for offset in range(len(self.source)):
            try:
                return self.source.load((index + offset) % len(self.source), mirror=mirror)
            except BadImage as error:
                if not self.skip_bad:
                    raise UserError(
                        f"{error}; remove the file, or use --data.on-bad-image skip"
                    ) from None
                bad.append(str(error))
        raise UserError("no image of the data set can be decoded")

    def _to_tensor(self, items: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(items))
        if self.source.kind == "latents":
            return tensor
        return from_uint8(tensor)


def from_uint8(pixels: Tensor) -> Tensor:
    """What codecs encode: uint8 (B, H, W, C) -> fp32 (B, C, H, W) in [-1, 1]."""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


class _ErrorsAsValues(Dataset):
    """Carries a UserError out of a worker as it is; DataLoader would wrap it in a traceback."""

    def __init__(self, loader: StepLoader):
        self.loader = loader

    def __getitem__(self, key: tuple[int, int]) -> Batch | UserError:
        try:
            return self.loader[key]
        except UserError as error:
            return error


def _keys(step: int, accumulation: int) -> Iterator[tuple[int, int]]:
    while True:
        for micro in range(accumulation):
            yield step, micro
        step += 1


def _stand_apart(worker: int) -> None:
    """A signal to the trainer's group is the trainer's business: it saves, then ends its workers.

    Reset first: a forked worker inherits the trainer's handlers and would not end when told to.
    """
    del worker
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setsid"):
        os.setsid()
