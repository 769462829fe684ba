"""Draws attention maps and suppressed channels: `python evaluate/attention.py --checkpoint RUN`."""

from sit_vit5.commands.attention import main
from sit_vit5.config.parse import run

if __name__ == "__main__":
    run(main)
