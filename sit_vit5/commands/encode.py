"""Encodes a data set once: `accelerate launch -m sit_vit5 encode --data.path DATA --out DIR`.

Training then reads moments from disk (`--data.path DIR`) and needs no autoencoder. Every image is
encoded as it is and mirrored, since a mirrored latent is not the latent of the mirrored image.
"""

from __future__ import annotations

from pathlib import Path

from sit_vit5.config import EncodeConfig
from sit_vit5.config.parse import parse
from sit_vit5.data.encode import Job, encode, plan_layout
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import check_apart


def main(argv: list[str]) -> None:
    """Parse, build, encode; the last line is the folder's path."""
    options = parse(EncodeConfig, argv)

    from sit_vit5.codecs import configured_codec
    from sit_vit5.data import build_source
    from sit_vit5.data.latent_cache import is_cache
    from sit_vit5.utils.distributed import join_processes
    from sit_vit5.utils.precision import set_tf32

    set_tf32(False)
    if options.data.path is not None and is_cache(Path(options.data.path)):
        raise UserError(f"{options.data.path} is a latent cache already; give --data.path images")
    check_apart(Path(options.out), options.data.path)
    source = build_source(options.data)
    codec = configured_codec(options.codec)
    encode(Job(options, source, codec, plan_layout(options, source, codec)), join_processes())
