"""rFID of a codec: `python evaluate/reconstruction.py --data DATA --codec.name sd-vae-ema ...`."""

from sit_vit5.commands.reconstruct import main
from sit_vit5.config.parse import run

if __name__ == "__main__":
    run(main)
