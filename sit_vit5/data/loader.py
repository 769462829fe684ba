"""The step-addressable loader: which image stands where is a function of (seed, position).

Position p = step * batch_size + place in the batch. Epoch e holds positions e * n .. e * n + n - 1
and its own permutation, so a resumed run asks for the next step and nothing is replayed or
skipped, whatever the number of processes, workers or accumulation steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sit_vit5 import rng
from sit_vit5.data import Source
from sit_vit5.data.images import BadImage, refusal
from sit_vit5.data.workers import PATIENCE, read_ahead
from sit_vit5.distributed import BatchPlan
from sit_vit5.errors import UserError


class Posterior(Protocol):
    """The half of a codec that a latent cache leaves to do."""

    draws_noise: bool

    def latents(self, moments: Tensor, noise: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class Batch:
    """One micro-batch. images: fp32 (b, C, H, W) in [-1, 1], or latents; labels: int64 (b,)."""

    images: Tensor
    labels: Tensor
    bad_images: tuple[str, ...] = ()

    def pin_memory(self) -> Batch:
        """Called by DataLoader where there is a GPU: pinned images travel beside the work."""
        return replace(self, images=self.images.pin_memory(), labels=self.labels.pin_memory())


class StepLoader:
    """Micro-batches by (step, micro), alone or as an endless prefetched stream.

    posterior: turns cached moments into latents; for a source of moments only.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        *,
        seed: int,
        horizontal_flip: bool = False,
        on_bad_image: str = "error",
        workers: int = 0,
        posterior: Posterior | None = None,
    ):
        if len(source) < plan.batch_size:
            raise UserError(
                f"{len(source)} images are fewer than batch_size {plan.batch_size}; "
                "lower batch_size or add images"
            )
        self.source, self.plan, self.seed = source, plan, seed
        self.horizontal_flip, self.skip_bad = horizontal_flip, on_bad_image == "skip"
        self.workers, self.posterior = workers, posterior
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key != "_order"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._order = lru_cache(maxsize=2)(self._permutation)

    def indices(self, step: int, places: range) -> np.ndarray:
        """Indices in the source of the images at these places of a step's batch."""
        positions = step * self.plan.batch_size + np.arange(places.start, places.stop)
        epochs, places_in_epoch = np.divmod(positions, len(self.source))
        found = np.empty_like(positions)
        for epoch in np.unique(epochs):  # one, or two where an epoch ends within the batch
            here = epochs == epoch
            found[here] = self._order(int(epoch))[places_in_epoch[here]]
        return found

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        """Micro-batch `micro` of this rank at `step`; key = (step, micro)."""
        step, micro = key
        places = self.plan.indices(micro)
        indices, mirrored = self.indices(step, places), self._flips(step, places)
        if self.source.kind == "moments":
            return self._latents(indices, mirrored, step, places)
        return self._images(indices, mirrored)

    def steps(
        self,
        first_step: int,
        *,
        patience: float = PATIENCE,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[list[Batch]]:
        """The micro-batches of first_step, first_step + 1, ... without end, read ahead.

        patience, in seconds, and stopped: as in `read_ahead`.
        """
        count = self.plan.accumulation
        keys = _keys(first_step, count)
        stream = read_ahead(self, keys, workers=self.workers, patience=patience, stopped=stopped)
        try:
            while len(batches := list(islice(stream, count))) == count:
                yield batches
        finally:
            stream.close()

    def not_finite(self, step: int) -> list[str]:
        """Cached images of a step's batch, in words, whose latents as trained on are not finite.

        Of all ranks; to be asked when a step went wrong.
        """
        if self.source.kind != "moments":
            return []  # uint8 images, and codecs that refuse such latents
        places = range(self.plan.batch_size)
        indices, mirrored = self.indices(step, places), self._flips(step, places)
        latents = self._latents(indices, mirrored, step, places).images
        bad = ~latents.isfinite().flatten(1).all(dim=1).numpy()
        return [self.source.describe(int(index)) for index in indices[bad]]

    def _permutation(self, epoch: int) -> np.ndarray:
        return rng.generator(self.seed, "order", epoch).permutation(len(self.source))

    def _flips(self, step: int, places: range) -> np.ndarray:
        if not self.horizontal_flip:
            return np.zeros(len(places), bool)
        numbers = rng.uniform(self.seed, "flip", self.plan.batch_size, step=step)
        return numbers[places.start : places.stop] < 0.5

    def _latents(
        self, indices: np.ndarray, mirrored: np.ndarray, step: int, places: range
    ) -> Batch:
        """A fresh draw of every posterior, with the noise that encoding now would take."""
        moments, labels = self.source.batch(indices, mirrored)
        noise = None
        if self.posterior.draws_noise:
            noise = posterior_noise(self.seed, self.source.item_shape, step, places)
        latents = self.posterior.latents(torch.from_numpy(moments), noise)
        return Batch(latents, torch.from_numpy(labels))

    def _images(self, indices: np.ndarray, mirrored: np.ndarray) -> Batch:
        bad: list[str] = []
        items, labels = zip(
            *(self._load(int(i), bool(m), bad) for i, m in zip(indices, mirrored, strict=True)),
            strict=True,
        )
        pixels = torch.from_numpy(np.ascontiguousarray(np.stack(items)))
        return Batch(from_uint8(pixels), torch.tensor(labels), tuple(bad))

    def _load(self, index: int, mirror: bool, bad: list[str]) -> tuple[np.ndarray, int]:
        """The item at index, or the next that can be decoded where bad images are skipped."""
        for offset in range(len(self.source)):
            try:
                return self.source.load((index + offset) % len(self.source), mirror=mirror)
            except BadImage as error:
                if not self.skip_bad:
                    raise refusal(error) from None
                bad.append(str(error))
        raise UserError("no image of the data set can be decoded")


def posterior_noise(
    seed: int, latent_shape: tuple[int, int, int], step: int, places: Iterable[int]
) -> Tensor:
    """The standard normal noise of an autoencoder's draws at these places of a step's batch."""
    return torch.from_numpy(rng.normal(seed, "posterior", latent_shape, step=step, indices=places))


def from_uint8(pixels: Tensor) -> Tensor:
    """What codecs encode: uint8 (B, H, W, C) -> fp32 (B, C, H, W) in [-1, 1]."""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


def _keys(step: int, accumulation: int) -> Iterator[tuple[int, int]]:
    while True:
        for micro in range(accumulation):
            yield step, micro
        step += 1
