"""The command `python -m sit_vit5 inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sit_vit5.config import DataConfig, InspectConfig
from sit_vit5.config.parse import parse
from sit_vit5.data import Source, build_source
from sit_vit5.data.latent_cache import LatentCache
from sit_vit5.utils.files import check_apart, check_output

if TYPE_CHECKING:
    from sit_vit5.data import Source
    from sit_vit5.data.latent_cache import LatentCache
from sit_vit5.analysis.inspect_data import describe_classes, inspect_cache, inspect_images


def main(argv: list[str]) -> None:
    """Parse, look, draw; the last line is the picture's path, if there is one."""
    options = parse(InspectConfig, argv)
    check_apart(Path(options.out), options.data.path)
    check_output(Path(options.out))

    source = open_data(options.data)
    print(*describe_classes(source), *source.notes, sep="\n")
    look = inspect_images if source.kind == "images" else inspect_cache
    look(source, options)


def open_data(data: DataConfig) -> Source | LatentCache:
    """The data set; a cache of any image size, since nothing is trained."""
    from sit_vit5.data.latent_cache import LatentCache, is_cache

    if data.path is not None and is_cache(Path(data.path)):
        return LatentCache(data.path, unconditional=data.unconditional)
    return build_source(data)
