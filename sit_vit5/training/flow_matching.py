"""The loss of one micro-batch, with every random number a function of (seed, step, place)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sit_vit5.codecs import Codec
from sit_vit5.config import ObjectiveConfig
from sit_vit5.data.loader import Batch, posterior_noise
from sit_vit5.flow.loss import drop_labels, flow_loss
from sit_vit5.flow.times import TIMES, shift_times, training_interval
from sit_vit5.training.parallel import send
from sit_vit5.utils import rng
from sit_vit5.utils.distributed import BatchPlan


def training_times(u: Tensor, config: ObjectiveConfig) -> Tensor:
    """t of uniform numbers u: the distribution, shifted, on the interval of path and prediction."""
    low, high = training_interval(config.interpolant, config.prediction)
    t = TIMES[config.times](u, config.times_mean, config.times_std)
    return low + (high - low) * shift_times(t, config.shift)


@dataclass(frozen=True)
class Objective:
    """The flow-matching objective: losses of a micro-batch. It has no state."""

    config: ObjectiveConfig
    source_kind: str
    codec: Codec
    plan: BatchPlan
    seed: int
    latent_shape: tuple[int, int, int]
    null_label: int | None

    def latents(self, batch: Batch, step: int, micro: int, device: torch.device) -> Tensor:
        """Latents of the micro-batch on the device; the codec's own noise is keyed like ours."""
        images = send(batch.images, device)
        if self.source_kind == "moments":  # the loader drew the latents
            return images
        noise = None
        if self.codec.draws_noise:
            places = self.plan.indices(micro)
            noise = send(posterior_noise(self.seed, self.latent_shape, step, places), device)
        return self.codec.encode(images, noise)

    def loss(
        self, model: nn.Module, latents: Tensor, labels: Tensor, *, step: int, micro: int
    ) -> Tensor:
        """Loss per sample, (b,), fp32."""
        device, places = latents.device, self.plan.indices(micro)
        u = send(self._uniform("time", step)[places.start : places.stop], device)
        config = self.config
        return flow_loss(
            model,
            latents,
            noise=send(self._noise(step, micro), device),
            t=training_times(u, config),
            labels=send(self._labels(labels, step, places), device),
            interpolant=config.interpolant,
            prediction=config.prediction,
            weights=config.weights,
            weights_bound=config.weights_bound,
        )

    def _labels(self, labels: Tensor, step: int, places: range) -> Tensor:
        if self.null_label is None:
            return labels
        return drop_labels(
            labels,
            self._uniform("class dropout", step)[places.start : places.stop],
            class_dropout=self.config.class_dropout,
            null_label=self.null_label,
        )

    def _noise(self, step: int, micro: int) -> Tensor:
        places = self.plan.indices(micro)
        return torch.from_numpy(
            rng.normal(self.seed, "noise", self.latent_shape, step=step, indices=places)
        )

    def _uniform(self, purpose: str, step: int) -> Tensor:
        return torch.from_numpy(rng.uniform(self.seed, purpose, self.plan.batch_size, step=step))
