"""The options of sit_vit5.data.encode and sit_vit5.analysis.inspect_data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from sit_vit5.config.fields import BatchSize, FilePath, NumImages, check_values
from sit_vit5.config.training import CodecConfig, DataConfig
from sit_vit5.utils.errors import UserError


@dataclass(frozen=True)
class EncodeConfig:
    """Encode a data set once, for training without the autoencoder: --data.path CACHE."""

    out: FilePath
    """Folder of the latent cache; a begun one is completed."""
    batch_size: BatchSize = 32
    """Images per encoder call and process, each with its mirror; halved when memory runs out."""
    dtype: Literal["float32", "float16"] = "float32"
    """Type of the stored numbers; float16 takes half the disk and rounds to 3 digits."""
    shard_size: Annotated[int, Ge(1), Le(10**7)] = 4096
    """Images per file."""
    changed: Literal["error", "encode"] = "error"
    """Images that changed since a begun or finished cache was encoded stop the encoding, or their
    files are encoded again."""
    data: DataConfig = DataConfig()
    codec: CodecConfig = CodecConfig()

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class InspectConfig:
    """Look at a data set or a latent cache before training on it."""

    out: FilePath = "inspect.png"
    """Picture to write: a few images of the first classes."""
    sample: NumImages = 1000
    """Images that are decoded to look for oddities, drawn at random."""
    verify: bool = False
    """Decode every image; of a cache, read every number, compare the hashes, and the images that
    it was encoded from if they are on this machine."""
    data: DataConfig = DataConfig()
    codec: CodecConfig = CodecConfig()

    def __post_init__(self) -> None:
        check_values(self)
        if not self.out.lower().endswith(".png"):
            raise UserError(f"out {self.out} must end in .png")
