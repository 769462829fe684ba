"""The grid that a trainer draws: a callable, so that training knows nothing of sampling."""

from __future__ import annotations

from pathlib import Path

from sit_vit5.codecs import Codec
from sit_vit5.config import TrainConfig
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.sampling.generator import Settings
from sit_vit5.sampling.grid import sample_grid
from sit_vit5.sampling.guidance import guidance_scale_or_default


class GridPreview:
    """Draws every named network from the same noise, at each call the same noise again."""

    def __init__(self, config: TrainConfig, codec: Codec, class_names: tuple[str, ...]):
        self.config, self.codec, self.class_names = config.preview, codec, class_names
        self.settings = Settings(
            method=config.preview.method,
            steps=config.preview.steps,
            guidance_scale=guidance_scale_or_default(
                config.preview.guidance_scale,
                class_names=class_names,
                class_dropout=config.objective.class_dropout,
            ),
            precision=config.precision,
            attention=config.attention,
            seed=config.seed,
        )

    def __call__(self, networks: dict[str, Denoiser], path: Path) -> None:
        """Writes the grid to `path`."""
        grid = sample_grid(
            networks,
            self.codec,
            classes=range(min(self.config.classes, len(self.class_names))),
            class_names=self.class_names,
            columns=self.config.columns,
            settings=self.settings,
        )
        grid.save(path)
