"""The options of evaluate/calibrate.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sit_vit5.config.fields import BatchSize, FilePath, NumImages, Seed, check_values
from sit_vit5.config.training import CodecConfig


@dataclass(frozen=True)
class CalibrateConfig:
    """Find published values again before anything is trained: the evaluator on ADM's samples, and
    the sampler on SiT's weights. Run again, it continues."""

    reference: FilePath = "VIRTUAL_imagenet256_labeled.npz"
    """ADM's reference of ImageNet 256x256."""
    adm_samples: FilePath = "admnet_guided_upsampled_imagenet256.npz"
    """ADM's published samples, whose values its README states."""
    weights: FilePath = "SiT-XL-2-256.pt"
    """SiT's released weights."""
    features: str = "inception"
    """Features of the distances; published values are of inception."""
    feature_weights: FilePath | None = None
    """File of the features' network, instead of its library's cache."""
    num_samples: NumImages = 50_000
    """Samples of each sampler; only values of 50,000 are judged."""
    batch_size: BatchSize = 64
    """Images per network call and process."""
    precision: Literal["bf16", "tf32", "fp32"] | None = None
    """Precision of matrix products in sampling; None: tf32 on CUDA, as SiT's code, else fp32."""
    seed: Seed = 0
    """Of noise and labels."""
    out: FilePath = "calibration"
    """Folder for the converted weights, the samples, their metrics and calibration.json."""
    codec: CodecConfig = CodecConfig()

    def __post_init__(self) -> None:
        check_values(self)
