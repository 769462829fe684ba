"""Finds published values again: `python evaluate/calibrate.py --reference REF --weights FILE`."""

from sit_vit5.commands.calibrate import main
from sit_vit5.config.parse import run

if __name__ == "__main__":
    run(main)
