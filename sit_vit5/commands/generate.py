"""Writes N samples: `accelerate launch sample/generate.py --checkpoint RUN --num-samples N`."""

from sit_vit5.config import GenerateConfig
from sit_vit5.config.parse import parse


def main(argv: list[str]) -> None:
    """Parse, load, make what is missing, pack; the last line is the archive's path."""
    options = parse(GenerateConfig, argv)

    from sit_vit5.sampling.generate import generate
    from sit_vit5.utils.distributed import join_processes

    generate(options, join_processes())
