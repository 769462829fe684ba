"""Looks at data before a run does: `python -m sit_vit5.data.inspect --data.path DATA`.

Of images: classes, counts, sizes, oddities. Of a latent cache: what it holds, mean and deviation of
its latents, and images decoded from them. Both with a labelled picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sit_vit5.cli import parse, run
from sit_vit5.config import DataConfig, InspectConfig
from sit_vit5.files import check_apart, check_output

if TYPE_CHECKING:
    from sit_vit5.data import Source
    from sit_vit5.data.latent_cache import LatentCache


def main(argv: list[str]) -> None:
    """Parse, look, draw; the last line is the picture's path, if there is one."""
    options = parse(InspectConfig, argv)
    check_apart(Path(options.out), options.data.path)
    check_output(Path(options.out))

    from sit_vit5.data.inspect.cache import inspect_cache
    from sit_vit5.data.inspect.classes import describe_classes
    from sit_vit5.data.inspect.images import inspect_images

    source = open_data(options.data)
    print(*describe_classes(source), *source.notes, sep="\n")
    look = inspect_images if source.kind == "images" else inspect_cache
    look(source, options)


def open_data(data: DataConfig) -> Source | LatentCache:
    """The data set; a cache of any image size, since nothing is trained."""
    from sit_vit5.data import build_source
    from sit_vit5.data.latent_cache import LatentCache, is_cache

    if data.path is not None and is_cache(Path(data.path)):
        return LatentCache(data.path, unconditional=data.unconditional)
    return build_source(data)


if __name__ == "__main__":
    run(main)
