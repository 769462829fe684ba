"""Log-likelihood of images: `python evaluate/likelihood.py --checkpoint RUN --data FOLDER`."""

from sit_vit5.commands.likelihood import main
from sit_vit5.config.parse import run

if __name__ == "__main__":
    run(main)
