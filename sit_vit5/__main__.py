"""`python -m sit_vit5 COMMAND`: all commands, also from an installed package."""

from sit_vit5.commands import main
from sit_vit5.config.parse import run

if __name__ == "__main__":
    run(main)
