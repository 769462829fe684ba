"""Images to feature vectors. A new extractor is one class and one line in `EXTRACTORS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from sit_vit5.errors import UserError, choose
from sit_vit5.files import file_hash
from sit_vit5.metrics.statistics import Statistics
from sit_vit5.precision import set_tf32
from sit_vit5.progress import progress_bar

MOST_PIXELS = 4096  # a covariance of 128 MB


class Extractor(Protocol):
    """uint8 (B, H, W, C) to fp64 or fp32 (B, D). identity: what a result depends on."""

    identity: dict

    def __call__(self, images: np.ndarray) -> np.ndarray: ...


class Pixels:
    """Grey values in [0, 1], flattened: for small images, where they mean something."""

    def __init__(self, weights: str | None = None):
        if weights is not None:
            raise UserError("--inception-weights has no use with features pixels")
        self.identity = {"features": "pixels"}

    def __call__(self, images: np.ndarray) -> np.ndarray:
        flat = images.reshape(len(images), -1)
        if flat.shape[1] > MOST_PIXELS:
            raise UserError(
                f"features pixels are for small images: {flat.shape[1]:,} numbers per image, at "
                f"most {MOST_PIXELS:,}; use --features inception"
            )
        return flat / 255.0


class Inception:
    """2,048 pool features of torch-fidelity's InceptionV3, the port of the TensorFlow original.

    It resizes as TensorFlow did; runs in fp32 without TF32. Grey images are repeated to RGB.
    """

    def __init__(self, weights: str | None = None):
        self.path = find_inception_weights(weights)
        # Imported here: torch-fidelity takes seconds, and pixels need none of it.
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        set_tf32(False)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            # The library unpickles the file without restriction: first make sure that it holds
            # nothing but tensors.
            torch.load(self.path, weights_only=True, map_location="meta")
            network = FeatureExtractorInceptionV3(
                "inception-v3-compat", ["2048"], feature_extractor_weights_path=str(self.path)
            )
        except Exception as error:  # torch.load raises many types on a foreign file
            raise UserError(
                f"{self.path} is not torch-fidelity's Inception weights file: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from None
        self.network = network.to(self.device).eval()
        self.identity = {"features": "inception", "weights_sha256": file_hash(self.path)}

    @torch.inference_mode()
    def __call__(self, images: np.ndarray) -> np.ndarray:
        rgb = np.broadcast_to(images, (*images.shape[:3], 3))
        batch = torch.from_numpy(rgb.copy()).permute(0, 3, 1, 2).to(self.device)
        (features,) = self.network(batch)
        return features.float().cpu().numpy()


EXTRACTORS: dict[str, Callable[[str | None], Extractor]] = {
    "pixels": Pixels,
    "inception": Inception,
}


def build_extractor(name: str, weights: str | None = None) -> Extractor:
    """The extractor called `name`; weights: a local file instead of the library's cache."""
    return choose("features", name, EXTRACTORS)(weights)


def find_inception_weights(path: str | None) -> Path:
    """The given file, or torch-fidelity's in torch's cache; never a download by surprise."""
    from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3

    name = URL_INCEPTION_V3.rsplit("/", 1)[1]
    found = Path(path) if path else Path(torch.hub.get_dir()) / "checkpoints" / name
    if not found.is_file():
        raise UserError(
            f"Inception weights {found} do not exist; download {URL_INCEPTION_V3} to that place, "
            "or give the file with --inception-weights FILE; for small images --features pixels"
        )
    return found


def extract_statistics(
    extractor: Extractor, batches: Iterable[np.ndarray], *, title: str, total: int
) -> Statistics:
    """Statistics of all batches of uint8 images. Refuses an empty set."""
    statistics = None
    with progress_bar(total, unit="image", title=title) as bar:
        for images in batches:
            features = extractor(images)
            if not np.isfinite(features).all():
                raise UserError(f"{title}: non-finite features; check the extractor")
            part = Statistics.of(features)
            statistics = part if statistics is None else statistics.merge(part)
            bar.update(len(images))
    if statistics is None:
        raise UserError(f"{title}: no images")
    return statistics
