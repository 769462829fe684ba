"""Ranks guidance and averages: `python evaluate/sweep.py --checkpoint RUN --reference REF`."""

from sit_vit5.config import SweepConfig
from sit_vit5.config.parse import parse


def main(argv: list[str]) -> None:
    """Parse, fill every cell, report; the last lines are the paths of JSON, CSV and picture."""
    options = parse(SweepConfig, argv)

    from sit_vit5.evaluation.sweep import sweep
    from sit_vit5.utils.distributed import join_processes

    sweep(options, join_processes())
