"""Writing a checkpoint, or snapshots of averages, of the step that has just ended."""

from __future__ import annotations

from pathlib import Path

from sit_vit5.checkpoint import State, prune_checkpoints, save_checkpoint
from sit_vit5.codecs import Codec
from sit_vit5.config import TrainConfig
from sit_vit5.data import Source
from sit_vit5.errors import UserError
from sit_vit5.run_folder import has_latest, last_good_checkpoint
from sit_vit5.snapshots import write_snapshots
from sit_vit5.training.learner import Learner
from sit_vit5.training.watchdog import Watchdog


def write_checkpoint(
    run: Path,
    config: TrainConfig,
    *,
    step: int,
    learner: Learner,
    watchdog: Watchdog,
    source: Source,
    codec: Codec,
    data_offset: int,
) -> bool:
    """Saves and prunes, unless `latest` is this step's already: whether it did.

    Refuses weights that broke.
    """
    if has_latest(run, step):
        return False
    _check_finite(run, step, learner)
    state = State(
        step=step,
        images_seen=step * config.batch_size,
        skipped_steps=watchdog.skipped,
        skipped_in_a_row=watchdog.in_a_row,
        in_channels=learner.latent_shape[0],
        input_size=learner.latent_shape[1:],
        class_names=source.class_names,
        data=source.identity,
        codec=codec.identity,
        codec_origin=codec.origin,
        data_offset=data_offset,
        rewinds=watchdog.rewinds,
        grad_norms=tuple(watchdog.norms),
    )
    save_checkpoint(run, state, config, **learner.tensors())
    prune_checkpoints(run, config.checkpoint.keep, up_to=step)
    return True


def write_average_snapshots(run: Path, step: int, learner: Learner) -> bool:
    """Saves the power-function averages for good: True. Refuses weights that broke."""
    _check_finite(run, step, learner)
    write_snapshots(run, step, learner.ema.of_widths())
    return True


def _check_finite(run: Path, step: int, learner: Learner) -> None:
    if not learner.finite():
        raise UserError(
            f"the weights are not finite at step {step}: not saved; last good checkpoint: "
            f"{last_good_checkpoint(run)}; lower optimizer.lr"
        )
