"""The training loop: read it from `run` down."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from sit_vit5.checkpoint import Checkpoint, open_checkpoint
from sit_vit5.cli import differences
from sit_vit5.codecs import Codec
from sit_vit5.codecs.recorded import RecordedCodec
from sit_vit5.config import TrainConfig
from sit_vit5.data import Source
from sit_vit5.data.loader import Batch, StepLoader
from sit_vit5.distributed import BatchPlan, Words, join_processes, no_accelerator
from sit_vit5.errors import UserError
from sit_vit5.files import lock
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.precision import autocast, check_launcher, set_tf32
from sit_vit5.run_folder import LATEST_FILE, PAGE_FILE, SAMPLES, step_name
from sit_vit5.training import run as runs
from sit_vit5.training.banner import NO_DECODER, banner, check_first_latents
from sit_vit5.training.interrupt import Interrupt
from sit_vit5.training.learner import Learner
from sit_vit5.training.objective import Objective
from sit_vit5.training.optimizer import learning_rate
from sit_vit5.training.run_log import RunLog, report_bad_images
from sit_vit5.training.save import write_average_snapshots, write_checkpoint
from sit_vit5.training.trackers import check_trackers
from sit_vit5.training.watchdog import Watchdog

# Draws a grid of every named network into a file.
Preview = Callable[[dict[str, Denoiser], Path], None]

# Above every signal number.
FAILED = 1000


@dataclass(frozen=True)
class Unsettled:
    """A step that the device may still be working on: its number, gradient norm and loss."""

    step: int
    grad_norm: Tensor
    loss: Tensor


class Trainer:
    """One run on one or more processes; `accelerate launch` or nothing starts them."""

    def __init__(
        self,
        config: TrainConfig,
        source: Source,
        codec: Codec | RecordedCodec,
        *,
        preview: Preview | None,
        resume: Checkpoint | None = None,
    ):
        check_launcher(config.precision)
        check_trackers(config.trackers)
        join_processes()
        set_tf32(False)
        self.config, self.source, self.codec, self.preview = config, source, codec, preview
        self.run_folder = runs.run_folder(config, resume)
        if resume is None:
            runs.check_new(self.run_folder)
        else:
            runs.check_resume(self.run_folder, resume, config, source, codec)
        self.accelerator = Accelerator(mixed_precision="no", cpu=no_accelerator())
        self.device, self.is_main = self.accelerator.device, self.accelerator.is_main_process
        patience = timedelta(minutes=config.watchdog.patience)
        self.words = Words(self.accelerator.num_processes, patience)
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
            posterior=codec if source.kind == "moments" else None,
        )
        if source.kind == "moments":
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
            with RunLog(self.run_folder, self.config, first_step=self.step) as self.log:
                return self._loop()

    def _build(self, resume: Checkpoint | None) -> None:
        """The learner and the counters, fresh or from a checkpoint."""
        config = self.config
        self.learner = Learner(config, self.latent_shape, self.source.class_names, self.device)
        self.step, self.data_offset, self.notes = 0, 0, []
        self.watchdog = Watchdog(config.max_skipped, config.watchdog)
        self.unsettled: Unsettled | None = None
        if resume is not None:
            self._restore(resume)
            self.notes = [
                f"changed on resume: {change}" for change in differences(resume.config, config)
            ]
        elif config.init_from:
            self.notes = self.learner.init_from(config.init_from)
        if self.preview is None and config.preview.every:
            self.notes.append(NO_DECODER)
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

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Goes to the step of a checkpoint."""
        self.learner.restore(checkpoint)
        state, self.unsettled = checkpoint.state, None
        self.step, self.data_offset = state.step, state.data_offset
        self.watchdog = Watchdog(
            self.config.max_skipped,
            self.config.watchdog,
            skipped=state.skipped_steps,
            in_a_row=state.skipped_in_a_row,
            rewinds=state.rewinds,
            norms=list(state.grad_norms),
        )

    def _loop(self) -> int:
        self._say(*banner(self), *self.notes)
        if self.step >= self.config.steps:
            self._say(f"step {self.step} of {self.config.steps} is reached: nothing to do")
            return 0
        if self.step == 0:  # a save that cannot work fails now, not after hours
            self._save()
        with Interrupt() as interrupt:
            while self.step < self.config.steps:
                # Closed: workers that outlive the run complain at the interpreter's exit.
                with closing(self.loader.steps(self.data_step)) as stream:
                    stopped = self._steps(stream, interrupt)
                if stopped:
                    return self._stop(stopped)
        self._say(
            f"done: {self.run_folder}; look at {self.run_folder / PAGE_FILE}, then draw: "
            f"python sample/grid.py --checkpoint {self.run_folder}"
        )
        return 0

    def _steps(self, stream: Iterator[list[Batch]], interrupt: Interrupt) -> int:
        """Steps to the end of the run, to a rewind, or to a signal, whose number is returned."""
        while self.step < self.config.steps:
            started = time.perf_counter()
            batches, failure = self._next(stream)
            waited = time.perf_counter() - started
            # One word per step between the ranks: go on, a signal, or a failure of any.
            stopped = self.words.largest(FAILED if failure else interrupt.signal)
            if stopped == FAILED:
                self._fail(failure)
            if stopped:
                return stopped
            self._train_step(batches)
            if self.is_main:
                self.log.step_done(time.perf_counter() - started, waited)
            self._after_step()
            if self.watchdog.action == "rewind":
                self._rewind()
                return 0
        return 0

    @property
    def data_step(self) -> int:
        """The step whose data, noise and times are next: rewinds pass some over."""
        return self.step + self.data_offset

    def _rewind(self) -> None:
        """Back to the last checkpoint, and past the data that were seen since."""
        why, rewinds = self.watchdog.why, self.watchdog.rewinds + 1
        next_data = self.data_step
        self._restore(open_checkpoint(self.run_folder))
        self.data_offset, self.watchdog.rewinds = next_data - self.step, rewinds
        self.loss_sum, self.loss_count = 0.0, 0
        if self.is_main:
            self.log.rewound(self.step)
        self._say(
            f"warning: {why}; back to step {self.step}, and past the data up to step {next_data} "
            f"(rewind {rewinds} of {self.config.watchdog.max_rewinds})"
        )

    def _train_step(self, batches: list[Batch]) -> None:
        """One optimizer step, or none if the gradient is not finite: the device itself decides.

        Nothing here waits for the device; what the step came to is read during the next one.
        """
        loss = self._gradients(batches)
        self._settle()
        norm = self.learner.update(self.step, limit=self.watchdog.limit())
        self.unsettled = Unsettled(self.step, norm, loss)
        self.step += 1

    def _gradients(self, batches: list[Batch]) -> Tensor:
        """Forward and backward of all micro-batches; the mean loss."""
        total = torch.zeros((), device=self.device)
        for micro, batch in enumerate(batches):
            latents = self.objective.latents(batch, self.data_step, micro, self.device)
            if self.data_step == micro == 0:
                self._say(*check_first_latents(latents))
            last = micro == len(batches) - 1
            # Gradients are averaged over processes once per step, in the last backward pass.
            with nullcontext() if last else self.accelerator.no_sync(self.wrapped):
                with autocast(self.device, self.config.precision):
                    losses = self.objective.loss(
                        self.wrapped, latents, batch.labels, step=self.data_step, micro=micro
                    )
                loss = losses.mean() / len(batches)
                loss.backward()
            total += loss.detach()
        return total

    def _settle(self) -> None:
        """Reads what the last step came to; the averages follow the weights that it left."""
        if self.unsettled is None:
            return
        last, self.unsettled = self.unsettled, None
        self.grad_norm = float(last.grad_norm)
        if self.watchdog.accepts(last.step, self.grad_norm):
            self.learner.average(last.step)
            self.loss_sum, self.loss_count = self.loss_sum + last.loss, self.loss_count + 1

    def _after_step(self) -> None:
        """Log, check, draw and save where an interval ends."""
        config, last = self.config, self.step == self.config.steps
        log = last or _due(self.step, config.log_every)
        save = last or _due(self.step, config.checkpoint.every)
        preview = self.preview is not None and _due(self.step, config.preview.every, last=last)
        snapshot = _due(self.step, config.ema.snapshot_every, last=last)
        if log or save or preview or snapshot:
            self._settle()
        if log:
            self._log()
        self.watchdog.check(self.step, self.run_folder)
        if self.watchdog.action == "rewind":
            return
        if snapshot:  # before the checkpoint: a run resumed from it would not write them
            self._write(
                f"EMA snapshots of {step_name(self.step)}",
                lambda: write_average_snapshots(self.run_folder, self.step, self.learner),
            )
        # A bad streak must not push good checkpoints out.
        if save and (last or self.watchdog.in_a_row == 0):
            self._save()  # before the picture, which is not worth a checkpoint
        if preview or save:
            self._draw(preview)

    def _stop(self, number: int) -> int:
        """Saves after a signal and says how to go on."""
        self._save()
        self._say(
            f"interrupted at step {self.step}; saved {self.run_folder / LATEST_FILE}; "
            f"continue with: python train_sit.py --resume "
            f"{shlex.quote(str(self.run_folder))}"
        )
        return 128 + number

    def _next(self, stream: Iterator[list[Batch]]) -> tuple[list[Batch], str]:
        """The next step's micro-batches; or why there are none, such as an undecodable file."""
        try:
            batches = next(stream)
        except UserError as error:
            return [], str(error)
        bad = [line for batch in batches for line in batch.bad_images]
        if bad:
            self._say(*report_bad_images(self.run_folder, bad))
        return batches, ""

    def _fail(self, failure: str) -> None:
        """Saves what there is, then stops all ranks with the words of the one that failed."""
        self._save()
        raise UserError(next(filter(None, gather_object([failure]))))

    def _log(self) -> None:
        """One row of metrics; the loss is the mean over the interval and all processes."""
        loss = None
        if self.loss_count:
            loss = self.accelerator.reduce(self.loss_sum / self.loss_count, "mean").item()
        self.loss_sum, self.loss_count = 0.0, 0
        self._say(*self.watchdog.report())
        for name in self.learner.still_averages():
            self._say(f"warning: the average {name} has not moved, though the weights have")
        if self.is_main:
            self.log.metrics(
                step=self.step,
                epoch=self.data_step * self.config.batch_size / len(self.source),
                loss=loss,
                grad_norm=self.grad_norm,
                lr=learning_rate(self.config.optimizer, self.step - 1),
                skipped_steps=self.watchdog.skipped,
            )

    def _draw(self, preview: bool) -> None:
        """The loss curve, and the preview grid if asked, on the main process."""
        if self.is_main:
            path = self.run_folder / SAMPLES / f"{step_name(self.step)}.png"
            try:
                self.log.draw_loss()
                if preview:
                    path.parent.mkdir(exist_ok=True)
                    self.preview(self.learner.networks(), path)
            except Exception as error:  # of any kind: out of memory, a full disk, NaN images
                self._say(f"warning: no picture at step {self.step}: {error}")
            self.log.show(path)
        for decay in self.learner.ema.young(self.step) if preview else []:
            self._say(f"note: the average {decay} still holds initial weights; judge it later")
        self.accelerator.wait_for_everyone()

    def _save(self) -> None:
        """A checkpoint of this step boundary."""
        self._settle()
        self._write(
            step_name(self.step),
            lambda: write_checkpoint(
                self.run_folder,
                self.config,
                step=self.step,
                learner=self.learner,
                watchdog=self.watchdog,
                source=self.source,
                codec=self.codec,
                data_offset=self.data_offset,
            ),
        )

    def _write(self, what: str, write: Callable[[], bool]) -> None:
        """Writes on the main process, if `write` finds it needed; called on every rank."""
        failure = None
        if self.is_main:
            try:
                if write():
                    self.log.event("saved", what)
            except UserError as error:
                failure = error
        if self.words.largest(failure is not None):  # all ranks stop together, none waits for ever
            raise failure or UserError("the first process could not save")

    def _say(self, *lines: str) -> None:
        if self.is_main:
            for line in lines:
                self.log.say(line)


def _due(step: int, every: int, *, last: bool = False) -> bool:
    return every > 0 and (last or step % every == 0)
