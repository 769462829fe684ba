"""The options of evaluate/reference.py and evaluate/reconstruction.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from annotated_types import Ge, Le
from tyro.conf import Positional

from sit_vit5.config.training import CodecConfig
from sit_vit5.errors import UserError
from sit_vit5.fields import BatchSize, FilePath, ImageSize, NumImages, Seed, Workers, check_values


@dataclass(frozen=True, kw_only=True)
class RealDataConfig:
    """How a data set is read that training could read."""

    source: str | None = None
    """As --data.source of train_sit.py; None: what lies at the path."""
    split: str | None = None
    """As --data.split of train_sit.py; None: train."""
    image_column: str | None = None
    """As --data.image-column of train_sit.py."""
    label_column: str | None = None
    """As --data.label-column of train_sit.py."""
    workers: Workers = 4
    """Processes that decode images; 0: none."""


@dataclass(frozen=True, kw_only=True)
class RealImagesConfig(RealDataConfig):
    """Real images, read as training reads them: the same sources, the same crop, never mirrored."""

    image_size: ImageSize = 256
    """Side of the images in pixels (ADM centre crop)."""
    unconditional: bool = False
    """Ignore the classes: a folder needs no sub-folders."""
    on_bad_image: Literal["error", "skip"] = "error"
    """A file that cannot be decoded stops the command, or is left out and counted."""
    features: str = "inception"
    """inception (torch-fidelity's InceptionV3), dinov2, timm:NAME or pixels."""
    weights: FilePath | None = None
    """File of the features' network, instead of its library's cache."""
    inception_weights: FilePath | None = None
    """The same, under the name that Inception's weights have in the other commands."""
    batch_size: BatchSize = 64
    """Images per feature batch; the result depends on it only by rounding."""


class HasWeights(Protocol):
    """Options that name an extractor and its weights."""

    features: str
    weights: str | None
    inception_weights: str | None


def check_weights(config: HasWeights) -> None:
    """Refuses two files of weights, and Inception's for other features."""
    if config.weights and config.inception_weights:
        raise UserError("weights and inception_weights are the same option; give one of them")
    if config.inception_weights and config.features != "inception":
        raise UserError(f"inception_weights has no use with features {config.features}; drop it")


@dataclass(frozen=True, kw_only=True)
class MakeReferenceConfig(RealImagesConfig):
    """Make a reference of a data set: statistics of all images, and some of the images."""

    data: Positional[FilePath]
    """Data set as --data.path of train_sit.py takes it, or digits:train, digits:held-out."""
    out: FilePath
    """Reference to write, an npz; a begun one is completed."""
    num_images_kept: NumImages = 10_000
    """Images kept for precision, recall and KID, drawn at random; all, if there are fewer."""
    seed: Seed = 0
    """Of the choice of the images that are kept."""

    def __post_init__(self) -> None:
        check_values(self)
        check_weights(self)
        if not self.out.endswith(".npz"):
            raise UserError(f"out {self.out} must end in .npz")


@dataclass(frozen=True)
class InspectReferenceConfig:
    """Say what is in a reference, a sample set or any other set of images, and check it."""

    file: Positional[FilePath]
    """npz, .npy, folder or zip archive of images."""


# Word after evaluate/reference.py -> its options.
REFERENCE_COMMANDS: dict[str, type] = {
    "make": MakeReferenceConfig,
    "inspect": InspectReferenceConfig,
}


@dataclass(frozen=True, kw_only=True)
class ReconstructionConfig(RealImagesConfig):
    """Encode and decode images with a codec: rFID, PSNR, SSIM and LPIPS against the originals."""

    data: FilePath
    """Data set as --data.path of train_sit.py takes it, mostly validation images; or digits:train,
    digits:held-out."""
    out: FilePath
    """Folder to write reconstruction.json and reconstruction.png to."""
    posterior: Literal["mode", "sample"] = "mode"
    """Decode the posterior's mean, or a draw of it as training sees it."""
    num_images: Annotated[int, Ge(0), Le(10**8)] = 0
    """Images, drawn from the data by the seed; 0: all."""
    seed: Seed = 0
    """Of the choice of images; the posterior's draws are those of (seed, image)."""
    lpips: Literal["alex", "vgg", "squeeze"] = "alex"
    """Network that LPIPS is built on; papers on autoencoders use alex or vgg, and rarely say."""
    lpips_weights: FilePath | None = None
    """File of torchvision's ImageNet weights of that network, instead of torch's cache."""
    columns: Annotated[int, Ge(1), Le(1000)] = 8
    """Images in the picture."""
    codec: CodecConfig = CodecConfig()

    def __post_init__(self) -> None:
        check_values(self)
        check_weights(self)
