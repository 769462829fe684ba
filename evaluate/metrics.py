"""Compares samples with a reference: `python evaluate/metrics.py samples.npz --reference REF`."""

from sit_vit5.commands.evaluate import main
from sit_vit5.config.parse import run

if __name__ == "__main__":
    run(main)
