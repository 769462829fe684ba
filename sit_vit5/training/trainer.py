"""The training loop: read it from `run` down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator

from sit_vit5.checkpoint import (
    Checkpoint,
    State,
    open_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from sit_vit5.codecs import Codec
from sit_vit5.config import TrainConfig
from sit_vit5.data import Source
from sit_vit5.data.loader import Batch, StepLoader
from sit_vit5.distributed import BatchPlan, check_joined, no_accelerator
from sit_vit5.errors import UserError
from sit_vit5.files import lock
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.precision import autocast, check_launcher, set_tf32
from sit_vit5.run_folder import LATEST_FILE, SAMPLES, step_name
from sit_vit5.training import run as runs
from sit_vit5.training.banner import banner, check_first_latents
from sit_vit5.training.interrupt import Interrupt
from sit_vit5.training.learner import Learner
from sit_vit5.training.objective import Objective
from sit_vit5.training.optimizer import learning_rate
from sit_vit5.training.run_log import LOSS_PLOT, RunLog, report_bad_images
from sit_vit5.training.watchdog import Watchdog

# Draws a grid of every named network into a file.
Preview = Callable[[dict[str, Denoiser], Path], None]


class Trainer:
    """One run on one or more processes; `accelerate launch` or nothing starts them."""

    def __init__(
        self,
        config: TrainConfig,
        source: Source,
        codec: Codec,
        *,
        preview: Preview,
        resume: Checkpoint | None = None,
    ):
        check_launcher(config.precision)
        set_tf32(False)
        self.config, self.source, self.codec, self.preview = config, source, codec, preview
        self.run_folder = runs.run_folder(config, resume)
        if resume is None:
            runs.check_new(self.run_folder)
        else:
            runs.check_resume(self.run_folder, resume, config, source, codec)
        self.accelerator = Accelerator(mixed_precision="no", cpu=no_accelerator())
        check_joined(self.accelerator.num_processes)
        self.device, self.is_main = self.accelerator.device, self.accelerator.is_main_process
        self.plan = BatchPlan(
            config.batch_size,
            config.accumulation,
            self.accelerator.num_processes,
            self.accelerator.process_index,
        )
        self.loader = StepLoader(
            source,
            self.plan,
            seed=config.seed,
            horizontal_flip=config.data.horizontal_flip,
            on_bad_image=config.data.on_bad_image,
            workers=config.data.workers,
        )
        if source.kind == "latents":
            self.latent_shape = source.item_shape
        else:
            runs.check_image_size(config.data.image_size, codec.factor, config.backbone.patch_size)
            self.latent_shape = codec.latent_shape(source.item_shape)
        self._build(resume)

    def run(self) -> int:
        """Trains to the last step; the exit status (128 + signal after an interruption)."""
        self.accelerator.wait_for_everyone()  # every rank has looked at the folder
        if not self.is_main:
            return self._loop()
        with lock(self.run_folder, "training run"):
            runs.write_config(self.run_folder, self.config)
            self.log = RunLog(self.run_folder, self.config, first_step=self.step)
            try:
                return self._loop()
            finally:
                self.log.close()

    def _build(self, resume: Checkpoint | None) -> None:
        """The learner and the counters, fresh or from a checkpoint."""
        config = self.config
        self.learner = Learner(config, self.latent_shape, self.source.class_names, self.device)
        self.step, self.watchdog, self.notes = 0, Watchdog(config.max_skipped), []
        if resume is not None:
            self.learner.restore(resume)
            self.step = resume.state.step
            self.watchdog.skipped = resume.state.skipped_steps
            self.watchdog.in_a_row = resume.state.skipped_in_a_row
        elif config.init_from:
            self.notes = self.learner.init_from(open_checkpoint(config.init_from))
        # Only the network is wrapped: the optimizer and the data order are our own.
        self.wrapped = self.accelerator.prepare_model(self.learner.model)
        self.objective = Objective(
            config.objective,
            self.source.kind,
            self.codec,
            self.plan,
            config.seed,
            self.latent_shape,
            self.learner.model.null_label,
        )
        self.loss_sum, self.loss_count, self.grad_norm = 0.0, 0, float("nan")

    def _loop(self) -> int:
        self._say(*banner(self), *self.notes)
        if self.step >= self.config.steps:
            self._say(f"step {self.step} of {self.config.steps} is reached: nothing to do")
            return 0
        if self.step == 0:  # a save that cannot work fails now, not after hours
            self._save()
        stream = self.loader.steps(self.step)
        with Interrupt() as interrupt:
            while self.step < self.config.steps:
                stopped = self._any(interrupt.signal)
                if stopped:
                    return self._stop(stopped)
                self._train_step(self._next(stream))
                self._after_step()
        self._say(
            f"done: {self.run_folder}; look at {self.run_folder / LOSS_PLOT} and "
            f"{self.run_folder / SAMPLES}, then: "
            f"python sample/grid.py --checkpoint {self.run_folder}"
        )
        return 0

    def _train_step(self, batches: list[Batch]) -> None:
        """One optimizer step, or none if the gradient is not finite."""
        started = time.perf_counter()
        step_loss = 0.0
        for micro, batch in enumerate(batches):
            latents = self.objective.latents(batch, self.step, micro, self.device)
            if self.step == micro == 0:
                self._say(*check_first_latents(latents))
            last = micro == len(batches) - 1
            # Gradients are averaged over processes once per step, in the last backward pass.
            with nullcontext() if last else self.accelerator.no_sync(self.wrapped):
                with autocast(self.device, self.config.precision):
                    losses = self.objective.loss(
                        self.wrapped, latents, batch.labels, step=self.step, micro=micro
                    )
                loss = losses.mean() / len(batches)
                loss.backward()
            step_loss += loss.detach()
        clip = self.config.optimizer.clip_norm or float("inf")
        parameters = self.learner.model.parameters()
        self.grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, clip))
        if self.watchdog.accepts(self.grad_norm):
            self.learner.update(self.step)
            self.loss_sum, self.loss_count = self.loss_sum + step_loss, self.loss_count + 1
        self.learner.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.is_main:
            self.log.step_done(time.perf_counter() - started)

    def _after_step(self) -> None:
        """Log, check, draw and save where an interval ends."""
        config, last = self.config, self.step == self.config.steps
        if _due(self.step, config.log_every) or last:
            self._log()
        self.watchdog.check(self.step, self.run_folder)
        if _due(self.step, config.preview.every) or (last and config.preview.every):
            self._draw()
        if _due(self.step, config.checkpoint.every) or last:
            self._save()

    def _stop(self, number: int) -> int:
        """Saves after a signal and says how to go on."""
        self._save()
        self._say(
            f"interrupted at step {self.step}; saved {self.run_folder / LATEST_FILE}; "
            f"continue with: python train_sit.py --resume {self.run_folder}"
        )
        return 128 + number

    def _next(self, stream: Iterator[list[Batch]]) -> list[Batch]:
        """The next step's micro-batches; a file that stops the run first saves what it has."""
        try:
            batches = next(stream)
        except UserError:
            if self.accelerator.num_processes == 1:
                self._save()
            raise
        bad = [line for batch in batches for line in batch.bad_images]
        if bad:
            self._say(*report_bad_images(self.run_folder, bad))
        return batches

    def _log(self) -> None:
        """One row of metrics; the loss is the mean over the interval and all processes."""
        loss = None
        if self.loss_count:
            loss = self.accelerator.reduce(self.loss_sum / self.loss_count, "mean").item()
        self.loss_sum, self.loss_count = 0.0, 0
        if self.is_main:
            self.log.metrics(
                step=self.step,
                epoch=self.step * self.config.batch_size / len(self.source),
                loss=loss,
                grad_norm=self.grad_norm,
                lr=learning_rate(self.config.optimizer, self.step - 1),
                skipped_steps=self.watchdog.skipped,
            )

    def _draw(self) -> None:
        """The preview grid and the loss curve, on the main process."""
        if self.is_main:
            path = self.run_folder / SAMPLES / f"{step_name(self.step)}.png"
            path.parent.mkdir(exist_ok=True)
            try:
                self.preview(self.learner.networks(), path)
                self.log.draw_loss()
            except (UserError, OSError) as error:  # a picture is not worth a run
                self._say(f"warning: no preview at step {self.step}: {error}")
        for decay in self.learner.ema.young(self.step):
            self._say(f"note: the average {decay} still holds initial weights; judge it later")
        self.accelerator.wait_for_everyone()

    def _save(self) -> None:
        """A checkpoint of this step boundary; called on every rank, written by one."""
        if self.is_main:
            save_checkpoint(
                self.run_folder,
                State(
                    step=self.step,
                    images_seen=self.step * self.config.batch_size,
                    skipped_steps=self.watchdog.skipped,
                    skipped_in_a_row=self.watchdog.in_a_row,
                    in_channels=self.latent_shape[0],
                    input_size=self.latent_shape[1:],
                    class_names=self.source.class_names,
                    data=self.source.identity,
                    codec=self.codec.identity,
                ),
                self.config,
                **self.learner.tensors(),
            )
            prune_checkpoints(self.run_folder, self.config.checkpoint.keep)
        self.accelerator.wait_for_everyone()

    def _any(self, number: int) -> int:
        """The largest signal number any rank has received, the same on all ranks."""
        if self.accelerator.num_processes == 1:
            return number
        received = torch.tensor([number], device=self.device)
        return int(self.accelerator.gather(received).max())

    def _say(self, *lines: str) -> None:
        if self.is_main:
            for line in lines:
                self.log.say(line)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
