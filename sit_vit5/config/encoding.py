"""The options of sit_vit5.data.encode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sit_vit5.config.checks import check_values
from sit_vit5.config.training import CodecConfig, DataConfig


@dataclass(frozen=True)
class EncodeConfig:
    """Encode a data set once, for training without the autoencoder: --data.path CACHE."""

    out: str
    """Folder of the latent cache; a begun one is completed."""
    batch_size: int = 32
    """Images per encoder call and process, each with its mirror; halved when memory runs out."""
    dtype: Literal["float32", "float16"] = "float32"
    """Type of the stored numbers; float16 takes half the disk and rounds to 3 digits."""
    shard_size: int = 4096
    """Images per file."""
    data: DataConfig = DataConfig()
    codec: CodecConfig = CodecConfig()

    def __post_init__(self) -> None:
        check_values(self)
