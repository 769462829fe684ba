"""How like its original is a reconstruction: PSNR, SSIM and LPIPS of pairs of images.

PSNR is a closed form. SSIM (Wang et al., 2004) is torchmetrics' and LPIPS (Zhang et al., 2018) its
authors' package, both optional: `pip install "sit_vit5[evaluation]"`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from sit_vit5.utils.errors import UserError, brief
from sit_vit5.utils.tensors import read_tensors

# uint8 (B, H, W, C) originals and reconstructions -> (B,), fp64.
Similarity = Callable[[np.ndarray, np.ndarray], np.ndarray]

WINDOW = 11  # side of SSIM's Gaussian window in pixels
PATCH = 64  # side of the images on which LPIPS was calibrated; its networks need half of it
EXTRA = 'pip install "sit_vit5[evaluation]"'


class Unavailable(UserError):
    """A similarity that cannot be had here; the message says why, and how to get it."""


def psnr(originals: np.ndarray, reconstructions: np.ndarray) -> np.ndarray:
    """10 log10(255^2 / mean squared error) in dB; infinite where nothing differs."""
    difference = originals.astype(np.float64) - reconstructions
    error = np.square(difference).mean(axis=(1, 2, 3))
    with np.errstate(divide="ignore"):
        return 10 * np.log10(255.0**2 / error)


def ssim(shape: tuple[int, int, int], device: torch.device) -> Similarity:
    """Structural similarity with the authors' constants, on whole windows, mean over channels.

    shape: (H, W, C) of the images.
    """
    try:
        # Imported here: optional, and it takes seconds.
        from torchmetrics.functional.image import structural_similarity_index_measure
    except ImportError:
        raise Unavailable(f"SSIM needs torchmetrics: {EXTRA}") from None
    if min(shape[:2]) < WINDOW:
        raise Unavailable(f"SSIM needs images of {WINDOW} pixels or more, these have {shape[:2]}")

    def measure(originals: np.ndarray, reconstructions: np.ndarray) -> np.ndarray:
        pair = (_tensor(images, device).double() for images in (reconstructions, originals))
        found = structural_similarity_index_measure(*pair, data_range=255.0, reduction="none")
        return found.reshape(-1).cpu().numpy()

    return measure


def lpips(
    shape: tuple[int, int, int], device: torch.device, *, network: str, weights: str | None
) -> Similarity:
    """The perceptual distance; smaller is more alike. Grey images are repeated to RGB.

    network: alex, vgg or squeeze; weights: torchvision's file of it, None: that in torch's cache.
    The calibration comes with the package.
    """
    try:
        # Imported here: optional.
        import lpips as library
    except ImportError:
        raise Unavailable(f"LPIPS needs the package lpips: {EXTRA}") from None
    if min(shape[:2]) < PATCH:
        raise Unavailable(f"LPIPS needs images of {PATCH} pixels or more, these have {shape[:2]}")
    path = find_backbone(network, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision's word for an argument that it has renamed
        model = library.LPIPS(net=network, pnet_rand=True, verbose=False)
    load_backbone(model.net, path, network)
    model = model.to(device).eval()

    @torch.inference_mode()
    def measure(originals: np.ndarray, reconstructions: np.ndarray) -> np.ndarray:
        pair = (_tensor(images, device) / 127.5 - 1 for images in (originals, reconstructions))
        return (
            model(*(images.expand(-1, 3, -1, -1) for images in pair))
            .flatten()
            .double()
            .cpu()
            .numpy()
        )

    return measure


def find_backbone(network: str, weights: str | None) -> Path:
    """The given file, or torchvision's in torch's cache; never a download by surprise."""
    # Imported here: torchvision takes a second.
    from torchvision.models import AlexNet_Weights, SqueezeNet1_1_Weights, VGG16_Weights

    published = {"alex": AlexNet_Weights, "vgg": VGG16_Weights, "squeeze": SqueezeNet1_1_Weights}
    url = published[network].IMAGENET1K_V1.url
    if weights is not None:
        if not Path(weights).is_file():
            raise UserError(f"lpips_weights {weights} does not exist; download {url}")
        return Path(weights)
    found = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[1]
    if not found.is_file():
        raise Unavailable(
            f"LPIPS needs {found}; download {url} to that place, or give it by --lpips-weights FILE"
        )
    return found


def load_backbone(network: nn.Module, path: Path, name: str) -> None:
    """torchvision's weights into the package's network, whose slices keep torchvision's numbers."""
    what = f"torchvision's {name} weights file"
    weights = read_tensors(path, remedy=f"download {what} again")
    try:
        for part in network.children():
            wanted = part.state_dict()
            part.load_state_dict({key: weights[f"features.{key}"] for key in wanted})
    except (KeyError, RuntimeError) as error:
        raise UserError(f"{path} is not {what}: {brief(error)}") from None


def _tensor(images: np.ndarray, device: torch.device) -> Tensor:
    """uint8 (B, H, W, C) as fp32 (B, C, H, W) in [0, 255]."""
    return torch.from_numpy(images).to(device).permute(0, 3, 1, 2).float()
