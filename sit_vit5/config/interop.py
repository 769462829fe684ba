"""Options of convert, export and posthoc-ema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le
from tyro.conf import Positional

from sit_vit5.config.fields import FilePath, Fraction, Interval, check_values
from sit_vit5.config.training import CodecConfig, check_width


@dataclass(frozen=True)
class ConvertConfig:
    """Turn official weights into a folder that the other commands read."""

    source: Positional[FilePath]
    """File of a released ViT-5 or DeiT-III classifier, or of SiT (.pt, .pth or .safetensors)."""
    to: FilePath
    """Folder to write; it must not exist."""
    kind: Literal["sit", "dit"] | None = None
    """SiT or DiT, whose files have the same keys; None: as the file's name says."""
    time: Literal["noise-to-data", "data-to-noise"] | None = None
    """Direction of time in a SiT: from noise (t = 0) to data as released, or from data to noise as
    in REPA, which is converted; None: as the file says."""
    step: Interval = 0
    """Optimizer steps behind the weights, for the record; 0: unknown."""
    heads: Annotated[int, Ge(1), Le(2**16)] | None = None
    """Attention heads; None: those of the published size with this width and depth."""
    class_names: FilePath | None = None
    """File with one class name per line; None: ImageNet's WordNet ids where classes are 1,000."""
    codec: CodecConfig = CodecConfig()

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class ExportConfig:
    """Write a checkpoint as a folder for diffusers, ready for the Hub."""

    checkpoint: FilePath
    """Checkpoint folder, a run folder, or its file `latest`."""
    to: FilePath
    """Folder to write; it must not exist."""
    weights: str = "ema"
    """raw, ema (the slowest average), ema_DECAY such as ema_0.9999, or ema_width_WIDTH."""
    license: str = "unknown"
    """Licence of the weights, for the model card: the Hub's name of it, such as mit."""
    codec_path: FilePath | None = None
    """Folder of the autoencoder, if it is not where training found it."""

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class PosthocEmaConfig:
    """Average a run's weights with another relative width, from the snapshots of its own."""

    run: FilePath
    """Run folder trained with ema.widths and ema.snapshot_every."""
    width: Fraction
    """Relative width: standard deviation of the average's weights over the steps, over their
    number."""
    to: FilePath
    """Checkpoint folder to write; it must not exist."""
    step: Interval | None = None
    """Optimizer step of a snapshot; None: the newest that is not after the newest checkpoint."""

    def __post_init__(self) -> None:
        check_values(self)
        check_width("width", self.width)
