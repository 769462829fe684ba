"""Draws how noise becomes images: `python sample/trajectory.py --checkpoint RUN --classes 3 7`."""

from sit_vit5.commands.trajectory import main
from sit_vit5.config.parse import run

if __name__ == "__main__":
    run(main)
