"""Draws a labelled grid of samples: `python sample/grid.py --checkpoint runs/digits/latest`."""

from sit_vit5.commands.grid import main
from sit_vit5.config.parse import run

if __name__ == "__main__":
    run(main)
