"""The options of sit_vit5.convert and sit_vit5.export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tyro.conf import Positional

from sit_vit5.config.checks import check_values
from sit_vit5.config.training import CodecConfig


@dataclass(frozen=True)
class ConvertConfig:
    """Turn official weights into a folder that the other commands read."""

    source: Positional[str]
    """File of a released ViT-5 or DeiT-III classifier, or of SiT (.pt, .pth or .safetensors)."""
    to: str
    """Folder to write; it must not exist."""
    kind: Literal["sit", "dit"] | None = None
    """SiT or DiT, whose files have the same keys; None: as the file's name says."""
    step: int = 0
    """Optimizer steps behind the weights, for the record; 0: unknown."""
    heads: int | None = None
    """Attention heads; None: those of the published size with this width and depth."""
    class_names: str | None = None
    """File with one class name per line; None: ImageNet's WordNet ids where classes are 1,000."""
    codec: CodecConfig = CodecConfig()

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class ExportConfig:
    """Write a checkpoint as a folder for diffusers, ready for the Hub."""

    checkpoint: str
    """Checkpoint folder, a run folder, or its file `latest`."""
    to: str
    """Folder to write; it must not exist."""
    weights: str = "ema"
    """raw, ema (the slowest average), or ema_DECAY such as ema_0.9999."""
    license: str = "unknown"
    """Licence of the weights, for the model card: the Hub's name of it, such as mit."""
    codec_path: str | None = None
    """Folder of the autoencoder, if it is not where training found it."""

    def __post_init__(self) -> None:
        check_values(self)
