"""Random weights of torch-fidelity's InceptionV3, in its own file layout, without its download."""

from __future__ import annotations

from pathlib import Path

import torch


def random_inception(path: Path) -> Path:
    """Writes weights that keep the size of activations, so that every feature says something."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3 as Network

    torch.save({}, path)
    original, Network.load_state_dict = Network.load_state_dict, lambda self, weights: None
    try:
        with torch.device("meta"):
            shapes = Network("random", ["2048"], feature_extractor_weights_path=str(path))
    finally:
        Network.load_state_dict = original
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, tensor in shapes.state_dict().items():
        if tensor.ndim >= 2:
            gain = (2 / tensor[0].numel()) ** 0.5
            weights[name] = gain * torch.randn(tensor.shape, generator=generator)
        else:  # norms that do nothing, and a bias that must not count
            fill = torch.ones if name.endswith(("bn.weight", "running_var")) else torch.zeros
            weights[name] = fill(tensor.shape, dtype=tensor.dtype)
    weights["fc.weight"] *= 20  # so that images are of different classes
    weights["fc.bias"] += 3
    torch.save(weights, path)
    return path
