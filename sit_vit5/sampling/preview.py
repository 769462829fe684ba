"""The grid that a trainer draws: a callable, so that training knows nothing of sampling."""

from __future__ import annotations

from pathlib import Path

from sit_vit5.codecs import Codec, build_codec, local_codec
from sit_vit5.codecs.recorded import RecordedCodec
from sit_vit5.config import TrainConfig
from sit_vit5.errors import UserError
from sit_vit5.files import save_image
from sit_vit5.flow.predictions import Flow
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.sampling.generator import Generator, Settings
from sit_vit5.sampling.grid import sample_grid
from sit_vit5.sampling.guidance import Guidance, guidance_scale_or_default


def preview_codec(config: TrainConfig, codec: Codec | RecordedCodec) -> Codec | None:
    """What decodes the grids: the codec itself; for a latent cache, one that lies on this machine.

    That is preview.decoder, else the cache's own codec, else a tiny decoder of the same latents.
    None: none of them is here, or no grids are wanted.
    """
    if not isinstance(codec, RecordedCodec):
        if config.preview.decoder is not None:
            raise UserError(
                "preview.decoder is for latent caches, images have their own codec; drop it"
            )
        return codec
    if config.preview.every == 0:
        return None
    if config.preview.decoder is not None:
        return build_codec("taesd", config.preview.decoder)
    return local_codec(codec, config.codec)


class GridPreview:
    """Draws every named network from the same noise, at each call the same noise again."""

    def __init__(self, config: TrainConfig, codec: Codec, class_names: tuple[str, ...]):
        self.config, self.codec, self.class_names = config.preview, codec, class_names
        objective = config.objective
        self.flow = Flow(objective.interpolant, objective.prediction)
        scale = guidance_scale_or_default(
            config.preview.guidance_scale,
            class_names=class_names,
            class_dropout=objective.class_dropout,
        )
        self.settings = Settings(
            method=config.preview.method,
            steps=config.preview.steps,
            shift=objective.shift,
            guidance=Guidance(scale),
            precision=config.precision,
            attention=config.attention,
            seed=config.seed,
        )

    def __call__(self, networks: dict[str, Denoiser], path: Path) -> None:
        """Writes the grid to `path`."""
        generators = {
            name: Generator(network, self.codec, self.flow, self.settings)
            for name, network in networks.items()
        }
        grid = sample_grid(
            generators,
            classes=range(min(self.config.classes, len(self.class_names))),
            class_names=self.class_names,
            columns=self.config.columns,
        )
        save_image(path, grid)
