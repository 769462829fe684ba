"""Averages chosen after training: `python -m sit_vit5 posthoc-ema --run RUN --width 0.13 --to DIR`.

Writes a checkpoint whose averaged weights are the combination of the run's snapshots nearest to a
power-function average of that width.
"""

from __future__ import annotations

from pathlib import Path

from sit_vit5.analysis.posthoc_ema import choose_step, report, state_at, with_width
from sit_vit5.config import PosthocEmaConfig, width_name
from sit_vit5.config.parse import parse
from sit_vit5.utils.files import check_new_folder
from sit_vit5.utils.power_ema import Profile, combine
from sit_vit5.utils.run_folder import run_of


def main(argv: list[str]) -> None:
    """Parse, solve, read, write; the last line is the folder's path."""
    options = parse(PosthocEmaConfig, argv)
    target = Path(options.to)
    check_new_folder(target)

    from sit_vit5.models.checkpoint import MODEL_FILE, import_checkpoint, open_checkpoint
    from sit_vit5.training.snapshots import find_snapshots, weighted_sum

    checkpoint = open_checkpoint(options.run)
    folder = run_of(checkpoint.folder)
    stored = find_snapshots(folder)
    # Snapshots after the checkpoint will be written anew, perhaps by a run with other options.
    step = choose_step(list(stored), options.step, up_to=checkpoint.state.step, folder=folder)
    stored = {profile: path for profile, path in stored.items() if profile.step <= step}
    found = combine(list(stored), Profile(step, options.width))
    report(options.width, step, list(stored), found.residual)
    parts = dict(zip(stored.values(), found.coefficients, strict=True))
    weights = weighted_sum(parts, checkpoint.folder / MODEL_FILE, checkpoint.config.backbone.recipe)
    import_checkpoint(
        target,
        state_at(checkpoint.state, step, checkpoint.config),
        with_width(checkpoint.config, options.width),
        averages={width_name(options.width): weights},
        model=None,
    )
    print(target)
