"""Writes N samples: `accelerate launch sample/generate.py --checkpoint RUN --num-samples N`."""

from sit_vit5.commands.generate import main
from sit_vit5.config.parse import run

if __name__ == "__main__":
    run(main)
