"""One optimizer step after another: gradients, update, and what the step came to."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from sit_vit5.codecs import Codec
from sit_vit5.codecs.autoencoder import scale_warnings
from sit_vit5.codecs.cached import RecordedCodec
from sit_vit5.config import TrainConfig
from sit_vit5.data import Source
from sit_vit5.data.loader import Batch
from sit_vit5.models.checkpoint import Checkpoint, State
from sit_vit5.models.fused import fused_kernels
from sit_vit5.training.flow_matching import Objective
from sit_vit5.training.parallel import AsyncScalar, gradients_stay
from sit_vit5.training.train_state import TrainState
from sit_vit5.training.watchdog import Watchdog
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.precision import autocast


@dataclass(frozen=True)
class Unsettled:
    """A step that the device may still be working on: its number, gradient norm and loss.

    data_step: the step whose data it saw.
    """

    step: int
    data_step: int
    grad_norm: AsyncScalar
    loss: Tensor


class Stepping:
    """Trains the learner. step: optimizer steps taken; data_offset: steps' data passed over.

    wrapped: the learner's network as the engine wants it called; not_finite: names the data of a
    step whose latents are not finite; say: prints a line.
    """

    def __init__(
        self,
        config: TrainConfig,
        learner: TrainState,
        objective: Objective,
        accelerator: Accelerator,
        wrapped: nn.Module,
        not_finite: Callable[[int], list[str]],
        say: Callable[[str], None],
    ):
        self.config, self.learner, self.objective = config, learner, objective
        self.accelerator, self.wrapped, self.say = accelerator, wrapped, say
        self.not_finite = not_finite
        self.step, self.images_seen, self.data_offset = 0, 0, 0
        self.watchdog = self._watchdog()
        self.grad_norm = float("nan")
        self._unsettled: Unsettled | None = None
        self._forget_losses()

    @property
    def data_step(self) -> int:
        """The step whose data, noise and times are next: rewinds pass some over."""
        return self.step + self.data_offset

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes to the step of a checkpoint."""
        self.learner.restore(checkpoint)
        state, self._unsettled = checkpoint.state, None
        self.step, self.images_seen = state.step, state.images_seen
        self.data_offset = state.data_offset
        self.watchdog = self._watchdog(
            skipped=state.skipped_steps,
            in_a_row=state.skipped_in_a_row,
            rewinds=state.rewinds,
            norms=list(state.grad_norms),
        )
        self._forget_losses()

    def train(self, batches: list[Batch]) -> None:
        """One optimizer step, or none if the gradient is not finite: the device itself decides.

        Nothing here waits for the device; what the step came to is read during the next one.
        """
        with fused_kernels():
            loss = self._gradients(batches)
        self.settle()
        norm = self.learner.update(self.step, limit=self.watchdog.limit())
        self._unsettled = Unsettled(self.step, self.data_step, AsyncScalar(norm), loss)
        self.step += 1
        self.images_seen += self.config.batch_size

    def settle(self) -> None:
        """Reads what the last step came to; the averages follow the weights that it left."""
        if self._unsettled is None:
            return
        last, self._unsettled = self._unsettled, None
        self.grad_norm = float(last.grad_norm)
        bad_data = [] if math.isfinite(self.grad_norm) else self._bad_data(last.data_step)
        if self.watchdog.accepts(last.step, self.grad_norm, bad_data):
            self.learner.average(last.step)
            self._loss_sum, self._loss_count = self._loss_sum + last.loss, self._loss_count + 1

    def state(self, source: Source, codec: Codec | RecordedCodec) -> State:
        """State of this step in a checkpoint, besides weights and configuration."""
        watchdog, shape = self.watchdog, self.learner.latent_shape
        return State(
            step=self.step,
            images_seen=self.images_seen,
            skipped_steps=watchdog.skipped,
            skipped_in_a_row=watchdog.in_a_row,
            in_channels=shape[0],
            input_size=shape[1:],
            class_names=source.class_names,
            data=source.identity,
            codec=codec.identity,
            codec_origin=codec.origin,
            data_offset=self.data_offset,
            rewinds=watchdog.rewinds,
            grad_norms=tuple(watchdog.norms),
        )

    def take_loss(self) -> float | None:
        """Mean loss over the processes and the steps since the last call; None: none counted.

        Every process must ask.
        """
        loss = None
        if self._loss_count:
            loss = self.accelerator.reduce(self._loss_sum / self._loss_count, "mean").item()
        self._forget_losses()
        return loss

    def _watchdog(self, **state: object) -> Watchdog:
        """A watchdog that counts on from a checkpoint's state."""
        path = shlex.quote(self.config.data.path or ".")
        check = f"check the data with python -m sit_vit5 inspect --data.path {path} --verify True"
        return Watchdog(self.config.max_skipped, self.config.watchdog, data_check=check, **state)

    def _bad_data(self, data_step: int) -> list[str]:
        """Names of the images of a step that are to blame for its gradient."""
        try:
            return self.not_finite(data_step)
        except (UserError, OSError):  # they cannot be read any more
            return []

    def _forget_losses(self) -> None:
        self._loss_sum, self._loss_count = 0.0, 0

    def _gradients(self, batches: list[Batch]) -> Tensor:
        """Forward and backward of all micro-batches; the mean loss."""
        device, step = self.accelerator.device, self.data_step
        total = torch.zeros((), device=device)
        for micro, batch in enumerate(batches):
            latents = self.objective.latents(batch, step, micro, device)
            if step == micro == 0:
                mean, std = latents.mean().item(), latents.std().item()
                for line in scale_warnings(self.config.codec.name, mean, std):
                    self.say(line)
            last = micro == len(batches) - 1
            # Gradients are averaged over processes once per step, in the last backward pass.
            with nullcontext() if last else gradients_stay(self.accelerator, self.wrapped):
                with autocast(device, self.config.precision):
                    losses = self.objective.loss(
                        self.wrapped, latents, batch.labels, step=step, micro=micro
                    )
                loss = losses.mean() / len(batches)
                loss.backward()
            total += loss.detach()
        return total
