"""Draws images between seeds: `python sample/interpolate.py --checkpoint RUN --seeds 0 1`."""

from sit_vit5.commands.interpolate import main
from sit_vit5.config.parse import run

if __name__ == "__main__":
    run(main)
