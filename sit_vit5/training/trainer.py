"""The training loop: read it from `run` down."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from sit_vit5.codecs import Codec
from sit_vit5.codecs.cached import RecordedCodec
from sit_vit5.config import TrainConfig
from sit_vit5.data import Source
from sit_vit5.data.loader import Batch, StepLoader
from sit_vit5.models.checkpoint import Checkpoint, open_checkpoint
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.training import run as runs
from sit_vit5.training.banner import NO_DECODER, banner
from sit_vit5.training.evaluation import BrokenOff, Evaluation, evaluate
from sit_vit5.training.flow_matching import Objective
from sit_vit5.training.logging import RunLog, check_trackers, report_bad_images
from sit_vit5.training.optimizer import warmup
from sit_vit5.training.parallel import shard
from sit_vit5.training.saver import Saver
from sit_vit5.training.stepping import Stepping
from sit_vit5.training.train_state import TrainState
from sit_vit5.training.watchdog import Interrupt
from sit_vit5.utils.distributed import (
    BatchPlan,
    HostSync,
    agree,
    join_processes,
    no_accelerator,
    shard_ourselves,
)
from sit_vit5.utils.errors import UserError, brief
from sit_vit5.utils.files import check_unused, lock
from sit_vit5.utils.precision import check_launcher, set_precision
from sit_vit5.utils.run_folder import CONFIG_FILE, LATEST_FILE, PAGE_FILE, SAMPLES, step_name

# Draws a grid of every named network into a file.
Preview = Callable[[dict[str, Denoiser], Path], None]

# Above every signal number.
FAILED = 1000
# Of watchdog.patience, before the loader gives up: sooner than the processes that wait for it.
LOADER_SHARE = 0.75
RUN = "training run"  # what holds a run folder


@dataclass(frozen=True)
class Outputs:
    """Outputs of a step besides its checkpoint. figures: loss.png and run.html."""

    evaluation: bool
    grid: bool
    figures: bool = False

    @property
    def any(self) -> bool:
        """True if anything is due."""
        return self.evaluation or self.grid or self.figures


class Trainer:
    """One run on one or more processes; `accelerate launch` or nothing starts them."""

    def __init__(
        self,
        config: TrainConfig,
        source: Source,
        codec: Codec | RecordedCodec,
        *,
        preview: Preview | None,
        evaluation: Evaluation | None = None,
        resume: Checkpoint | None = None,
    ):
        check_launcher(config.precision)
        check_trackers(config.trackers)
        self.processes = join_processes(minutes=config.watchdog.patience)
        set_precision(config.precision, self.processes.device)
        self.config, self.source, self.codec = config, source, codec
        self.preview, self.evaluation = preview, evaluation
        self.run_folder = runs.run_folder(config, resume)
        self._check_folder(resume)
        self.parallel = runs.parallel(config)
        shard_ourselves()
        self.accelerator = Accelerator(mixed_precision="no", cpu=no_accelerator())
        self.device, self.is_main = self.accelerator.device, self.accelerator.is_main_process
        patience = timedelta(minutes=config.watchdog.patience)
        self.words = HostSync(self.accelerator.num_processes, patience)
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
        self.latent_shape = runs.latent_shape(config, source, codec)
        self.resume = resume
        runs.check_memory_of_run(config, source, self.latent_shape, self.plan, self.device)
        self._build(resume)

    def run(self) -> int:
        """Trains to the last step; the exit status (128 + signal after an interruption)."""
        missing = self._missing()  # asked together: every rank has looked at the folder
        if self.step >= self.config.steps and not missing.any:
            if self.is_main:
                print(f"step {self.step} of {self.config.steps} is reached: nothing to do")
            return 0
        with ExitStack() as stack:
            with agree(self.processes):
                if self.is_main:
                    self._open(stack)
            return self._loop(missing)

    def _check_folder(self, resume: Checkpoint | None) -> None:
        """Refuses a folder that holds another run, or not the run as this one continues it."""
        try:
            if resume is None:
                runs.check_new(self.run_folder)
            else:
                runs.check_resume(self.run_folder, resume, self.config, self.source, self.codec)
        except UserError:
            if self.processes.is_main:  # the reason may be that it is at work
                check_unused(self.run_folder, RUN)
            raise

    def _open(self, stack: ExitStack) -> None:
        """Takes the run folder, once nothing can refuse the run any more."""
        lines = [*banner(self), *self.notes]  # the disk may be too small
        try:
            stack.enter_context(lock(self.run_folder, RUN))
        except OSError as error:
            raise UserError(
                f"cannot write to the run folder {self.run_folder}: {brief(error)}; choose another "
                "--output-dir"
            ) from None
        if self.resume is None:  # another process may have been here since
            runs.check_new(self.run_folder)
        else:
            runs.check_newest(self.run_folder, self.resume)
            runs.remove_partials(self.run_folder)
        cached = self.source.kind == "moments"
        log = RunLog(self.run_folder, self.config, first_step=self.step, cached=cached)
        self.log = stack.enter_context(log)
        stack.enter_context(closing(self.saver))
        self._say(*lines)

    def _build(self, resume: Checkpoint | None) -> None:
        """The learner and the counters, fresh or from a checkpoint."""
        config, processes = self.config, self.accelerator.num_processes
        sharded = self.parallel == "fsdp2" and processes > 1
        self.learner = TrainState(
            config,
            self.latent_shape,
            self.source.class_names,
            self.device,
            shard=partial(shard, device=self.device, processes=processes) if sharded else None,
        )
        notes = [] if resume else self.learner.init_from(config.init_from)
        model = self.learner.model
        self.steps = Stepping(
            config,
            self.learner,
            Objective(
                config.objective,
                self.source.kind,
                self.codec,
                self.plan,
                config.seed,
                self.latent_shape,
                model.null_label,
            ),
            self.accelerator,
            # Only the network is wrapped: the optimizer and the data order are our own.
            model if sharded else self.accelerator.prepare_model(model),
            self.loader.not_finite,
            self._say,
        )
        if resume is not None:
            self.steps.restore(resume)
            notes = runs.changes(resume, config)
        if self.preview is None and config.preview.every:
            notes.append(NO_DECODER)
        self.notes, self.interrupt = notes, Interrupt()
        self._failure, self._recorded, self._broken_off = "", False, False
        self.saver = Saver(
            self.run_folder,
            config,
            self.words,
            is_main=self.is_main,
            written=lambda what: self.log.event("saved", what),
        )

    def _loop(self, missing: Outputs) -> int:
        if self.step == 0:  # a save that cannot work fails now, not after hours
            self._save(wait=True)
        if self.resume is None:
            self._record_config()
        with self.interrupt, self.words.kept_together():
            if missing.evaluation:
                self._evaluate()
            if missing.any:
                self._draw(missing.grid)
            while self.step < self.config.steps:
                # Closed: workers that outlive the run complain at the interpreter's exit.
                with closing(self._batches()) as stream:
                    stopped = self._train(stream)
                if stopped == FAILED:
                    self._fail()
                if stopped:
                    return self._stop(stopped)
            if self._broken_off:  # a resume evaluates the last step
                return self._stop(self.words.largest(self.interrupt.signal))
        self.saver.join()
        self._say(
            f"done: {self.run_folder}; look at {self.run_folder / PAGE_FILE}, then draw: "
            f"python sample/grid.py --checkpoint {self.run_folder}"
        )
        return 0

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.steps.step

    def _batches(self) -> Iterator[list[Batch]]:
        """The data from the next step on. A signal ends the wait for them, as patience does."""
        return self.loader.steps(
            self.steps.data_step,
            patience=60 * LOADER_SHARE * self.config.watchdog.patience,
            stopped=lambda: self.interrupt.signal > 0,
        )

    def _train(self, stream: Iterator[list[Batch]]) -> int:
        """Steps to the end of the run, to a rewind, to a signal, whose number is returned, or to a
        failure (FAILED)."""
        while self.step < self.config.steps:
            started = time.perf_counter()
            batches, failure = self._next(stream)
            waited = time.perf_counter() - started
            self._failure = failure or self.saver.failed()
            # One word per step between the ranks: go on, a signal, or a failure of any.
            stopped = self.words.largest(FAILED if self._failure else self.interrupt.signal)
            if stopped:
                return stopped
            self.steps.train(batches)
            self._record_config()
            if self.is_main:
                self.log.step_done(time.perf_counter() - started, waited)
            self._after_step()
            if self.steps.watchdog.action == "rewind":
                self._rewind()
                return 0
        return 0

    def _rewind(self) -> None:
        """Back to the last checkpoint, and past the data that were seen since."""
        steps, watchdog = self.steps, self.steps.watchdog
        why, rewinds, next_data = watchdog.why, watchdog.rewinds + 1, steps.data_step
        self.saver.join()
        steps.restore(open_checkpoint(self.run_folder))
        steps.data_offset, steps.watchdog.rewinds = next_data - self.step, rewinds
        if self.is_main:
            self.log.rewound(self.step)
        self._say(
            f"warning: {why}; back to step {self.step}, and past the data up to step {next_data} "
            f"(rewind {rewinds} of {self.config.watchdog.max_rewinds})"
        )

    def _after_step(self) -> None:
        """Log, check, draw and save where an interval ends."""
        config, watchdog = self.config, self.steps.watchdog
        last = self.step == config.steps
        log = last or _due(self.step, config.log_every)
        milestone = _due(self.step, config.checkpoint.milestone_every)
        save = last or milestone or _due(self.step, config.checkpoint.every)
        snapshot = _due(self.step, config.ema.snapshot_every, last=last)
        due = self._due()
        if log or save or due.any or snapshot:
            self.steps.settle()
        if log:
            self._log()
        watchdog.check(self.step, self.run_folder)
        if watchdog.action == "rewind":
            return
        # A bad streak must not push good checkpoints out.
        save = save and (last or watchdog.in_a_row == 0)
        if save or snapshot:  # before the picture, which is not worth a checkpoint
            self._save(checkpoint=save, snapshot=snapshot)
        if due.evaluation:
            self._evaluate()
        if due.grid or save:
            self._draw(due.grid)

    def _due(self) -> Outputs:
        """Outputs due after this step."""
        config, last = self.config, self.step == self.config.steps
        return Outputs(
            evaluation=self.evaluation is not None
            and _due(self.step, config.evaluation.every, last=last),
            grid=self.preview is not None and _due(self.step, config.preview.every, last=last),
        )

    def _missing(self) -> Outputs:
        """Outputs of this step that a kill after its checkpoint prevented; all processes ask."""
        due, run, ours = self._due(), self.run_folder, self.is_main and self.step > 0
        lacks = Outputs(
            evaluation=ours and due.evaluation and not runs.is_evaluated(run, self.step),
            grid=ours and due.grid and not _grid(run, self.step).is_file(),
            figures=ours and self.step == self.config.steps and not runs.has_ended(run),
        )
        agreed = (bool(self.words.largest(lack)) for lack in astuple(lacks))
        return Outputs(*agreed)

    def _record_config(self) -> None:
        """Saves the configuration in the run folder, once there is a step or checkpoint of it."""
        if self._recorded or not self.is_main:
            return
        self._recorded = True
        try:
            runs.write_config(self.run_folder, self.config)
        except (OSError, UserError) as error:
            self._say(
                f"warning: {self.run_folder / CONFIG_FILE} not written: {brief(error)}; a resume "
                "before the next checkpoint needs changed options again"
            )

    def _stop(self, number: int) -> int:
        """Saves after a signal and says how to go on."""
        self._save(wait=True)
        if self.step < self.config.steps:
            self._record_config()
        self._say(
            f"interrupted at step {self.step}; saved {self.run_folder / LATEST_FILE}; "
            f"continue with: python train_sit.py --resume "
            f"{shlex.quote(str(self.run_folder))}"
        )
        return 128 + number

    def _next(self, stream: Iterator[list[Batch]]) -> tuple[list[Batch], str]:
        """The next step's micro-batches; or why there are none, such as an undecodable file."""
        try:
            batches = next(stream, [])
        except (UserError, OSError) as error:
            return [], str(error)
        bad = [line for batch in batches for line in batch.bad_images]
        if bad:
            self._say(*report_bad_images(self.run_folder, bad))
        return batches, ""

    def _fail(self) -> None:
        """Saves what there is, then stops all ranks with the words of the one that failed."""
        failure = next(filter(None, gather_object([self._failure])))
        with suppress(UserError):  # told already; there may be room by now
            self.saver.join()
        try:
            self._save(wait=True)
        except UserError as error:
            both = [failure] if failure in str(error) else [failure, str(error)]
            raise UserError("; ".join(both)) from None
        raise UserError(failure)

    def _log(self) -> None:
        """One row of metrics; the loss is the mean over the interval and all processes."""
        steps, loss = self.steps, self.steps.take_loss()
        self._say(*steps.watchdog.report())
        for name in self.learner.still_averages():
            self._say(f"warning: the average {name} has not moved, though the weights have")
        if self.is_main:
            self.log.metrics(
                step=self.step,
                epoch=steps.data_step * self.config.batch_size / len(self.source),
                images=steps.images_seen,
                loss=loss,
                grad_norm=steps.grad_norm,
                lr=self.config.optimizer.lr * warmup(self.config.optimizer, self.step - 1),
                skipped_steps=steps.watchdog.skipped,
            )

    def _evaluate(self) -> None:
        """Metrics of samples of one average, into the log."""
        name = self.config.ema.full_name(self.config.evaluation.weights)
        started = time.perf_counter()
        try:
            values = evaluate(
                self.evaluation, lambda: self.learner.copy(name), self.processes, self.words,
                stopped=lambda: self.interrupt.signal > 0,
            )  # fmt: skip
        except BrokenOff as error:
            self._broken_off = True
            self._say(f"warning: no evaluation at step {self.step}: {error}")
        except UserError as error:
            self._say(f"warning: no evaluation at step {self.step}: {error}")
        else:
            if self.is_main:
                self.log.evaluated(name, values, seconds=time.perf_counter() - started)

    def _draw(self, preview: bool) -> None:
        """The loss curve, and the preview grid if asked, on the main process."""
        path = _grid(self.run_folder, self.step)
        try:
            networks = {
                name.replace("ema_", "EMA ").replace("_", " "): self.learner.copy(
                    name, keep=self.is_main
                )
                for name in (("raw", *self.config.ema.names) if preview else ())
            }
            if self.is_main:
                self.log.draw_loss()
                if preview:
                    path.parent.mkdir(exist_ok=True)
                    self.preview(networks, path)
        except Exception as error:  # of any kind: out of memory, a full disk, NaN images
            self._say(f"warning: no picture at step {self.step}: {error}")
        if self.is_main:
            self.log.show(path)
        for decay in self.learner.ema.young(self.step) if preview else []:
            self._say(f"note: the average {decay} still holds initial weights; judge it later")
        self.accelerator.wait_for_everyone()

    def _save(self, *, checkpoint: bool = True, snapshot: bool = False, wait: bool = False) -> None:
        """A checkpoint, or snapshots of averages, of this step boundary; see `Saver.save`."""
        self.steps.settle()
        state = self.steps.state(self.source, self.codec)
        self.saver.save(state, self.learner, checkpoint=checkpoint, snapshot=snapshot, wait=wait)

    def _say(self, *lines: str) -> None:
        if self.is_main:
            for line in lines:
                self.log.say(line)


def _grid(run: Path, step: int) -> Path:
    return run / SAMPLES / f"{step_name(step)}.png"


def _due(step: int, every: int, *, last: bool = False) -> bool:
    return every > 0 and (last or step % every == 0)
