"""Checkpoints and snapshots on their way to the disk, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from sit_vit5.config import TrainConfig, width_name
from sit_vit5.models.checkpoint import State, prune_checkpoints, save_checkpoint
from sit_vit5.training.parallel import Staging
from sit_vit5.training.snapshots import write_snapshots
from sit_vit5.training.train_state import TrainState
from sit_vit5.utils.distributed import HostSync
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.run_folder import has_latest, last_good_checkpoint, step_name


class Saver:
    """Writes for one run: the first process to the disk, the others give their parts.

    All processes call `save` and `join` together. written: told what has reached the disk.
    """

    def __init__(
        self,
        run: Path,
        config: TrainConfig,
        words: HostSync,
        *,
        is_main: bool,
        written: Callable[[str], None],
    ):
        self.run, self.config, self.words = run, config, words
        self.is_main, self.written = is_main, written
        self._staging = Staging(keep=is_main)
        self._thread: threading.Thread | None = None
        self._failure: UserError | None = None

    def save(
        self,
        state: State,
        learner: TrainState,
        *,
        checkpoint: bool = True,
        snapshot: bool = False,
        wait: bool = False,
    ) -> None:
        """Copies the tensors of this step and writes them; what is written already is left.

        wait: until they are on the disk, though the configuration says background.
        """
        self.join()
        if checkpoint:
            checkpoint = not self._any(self.is_main and has_latest(self.run, state.step))
        if not (checkpoint or snapshot):
            return
        self._check_finite(state.step, learner)
        widths = {width_name(width): width for width in self.config.ema.widths}
        tensors = {
            group: self._staging.copy(group, tensors)
            for group, tensors in learner.tensors().items()
            if checkpoint or group in widths
        }
        if self.is_main:
            # Snapshots first: a run resumed from the checkpoint would not write them.
            work = [self._snapshots(state, widths, tensors)] if snapshot else []
            work += [self._checkpoint(state, tensors)] if checkpoint else []
            self._thread = threading.Thread(target=self._write, args=(work,), name="saver")
            self._thread.start()
        if wait or not self.config.checkpoint.background:
            self.join()

    def failed(self) -> str:
        """Why the last save failed, if it has; asked at every step, it waits for nothing."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        return str(self._failure or "")

    def join(self) -> None:
        """Waits for the disk; raises on every process what failed there."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if self._any(failure is not None):
            raise failure or UserError("the first process could not save")

    def close(self) -> None:
        """Lets a write that is under way end, though the run fails for another reason."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, work: list[tuple[str, Callable[[], None]]]) -> None:
        """In the thread: one after the other, up to the first failure."""
        try:
            for what, write in work:
                write()
                self.written(what)
        except UserError as error:
            self._failure = error
        except Exception as error:  # else it would be lost with the thread
            self._failure = UserError(f"cannot save to {self.run}: {error!r}")

    def _checkpoint(
        self, state: State, tensors: dict[str, dict[str, Tensor]]
    ) -> tuple[str, Callable[[], None]]:
        averages = {name: tensors[name] for name in self.config.ema.names}

        def write() -> None:
            save_checkpoint(
                self.run,
                state,
                self.config,
                model=tensors["raw"],
                averages=averages,
                optimizer=tensors["optimizer"],
            )
            prune_checkpoints(self.run, self.config.checkpoint, up_to=state.step)

        return step_name(state.step), write

    def _snapshots(
        self, state: State, widths: dict[str, float], tensors: dict[str, dict[str, Tensor]]
    ) -> tuple[str, Callable[[], None]]:
        averages = {width: tensors[name] for name, width in widths.items()}
        what = f"EMA snapshots of {step_name(state.step)}"
        return what, lambda: write_snapshots(self.run, state.step, averages)

    def _check_finite(self, step: int, learner: TrainState) -> None:
        if self._any(not learner.finite()):
            raise UserError(
                f"the weights are not finite at step {step}: not saved; last good checkpoint: "
                f"{last_good_checkpoint(self.run)}; lower optimizer.lr"
            )

    def _any(self, true_here: bool) -> bool:
        """True if it is true on any process."""
        return bool(self.words.largest(true_here))
