"""Trains a flow-matching model: `python train_sit.py --config configs/digits.yaml`."""

from sit_vit5.commands.train import main
from sit_vit5.config.parse import run

if __name__ == "__main__":
    run(main)
