"""References: `python evaluate/reference.py make DATA --out REF.npz`, `... inspect FILE`."""

from sit_vit5.commands.reference import main
from sit_vit5.config.parse import run

if __name__ == "__main__":
    run(main)
