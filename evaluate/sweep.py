"""Ranks guidance and averages: `python evaluate/sweep.py --checkpoint RUN --reference REF`."""

from sit_vit5.commands.sweep import main
from sit_vit5.config.parse import run

if __name__ == "__main__":
    run(main)
