"""Writes N samples: `accelerate launch sample/generate.py --checkpoint RUN --num-samples N`."""

from sit_vit5.cli import parse, run
from sit_vit5.config import GenerateConfig


def main(argv: list[str]) -> None:
    """Parse, load, make what is missing, pack; the last line is the archive's path."""
    options = parse(GenerateConfig, argv)

    from sit_vit5.distributed import join_processes
    from sit_vit5.sampling.generate import generate

    generate(options, join_processes())


if __name__ == "__main__":
    run(main)
