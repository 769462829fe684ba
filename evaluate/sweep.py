"""Ranks guidance and averages: `python evaluate/sweep.py --checkpoint RUN --reference REF`."""

from sit_vit5.cli import parse, run
from sit_vit5.config import SweepConfig


def main(argv: list[str]) -> None:
    """Parse, fill every cell, report; the last lines are the paths of JSON, CSV and picture."""
    options = parse(SweepConfig, argv)

    from sit_vit5.distributed import join_processes
    from sit_vit5.sweep import sweep

    sweep(options, join_processes())


if __name__ == "__main__":
    run(main)
