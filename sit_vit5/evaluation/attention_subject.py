"""What is looked into: a classifier or a denoiser, with the one image it is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sit_vit5 import rng
from sit_vit5.checkpoint import Checkpoint
from sit_vit5.codecs import Codec, to_uint8
from sit_vit5.config import AttentionConfig
from sit_vit5.data.digits import Digits
from sit_vit5.data.images import center_crop
from sit_vit5.data.loader import from_uint8
from sit_vit5.errors import UserError, brief, index_of
from sit_vit5.evaluation.attention_maps import Tokens
from sit_vit5.evaluation.inputs import BUILT_IN, read_pixels
from sit_vit5.flow.interpolants import coefficients
from sit_vit5.models.classifier import ViT5Classifier
from sit_vit5.models.classifier_folder import is_classifier_folder, load_classifier
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.official import official_classifier, read_official
from sit_vit5.run_folder import SAMPLES, run_of, step_name

# The gates of a denoiser are measured at TIMES times from 0 to 1 and at most CLASSES classes.
TIMES, CLASSES = 11, 10
# ImageNet's mean and deviation per channel, of values in [0, 1], as ViT-5's datasets.py takes them.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Subject:
    """pictures: uint8 (H, W, C) by title; forward: runs the network on the image; conditioning:
    (M, D) for the gates, None without; out: where its pictures go by default."""

    name: str
    sees: str
    pictures: dict[str, np.ndarray]
    blocks: nn.ModuleList
    tokens: Tokens
    forward: Callable[[], object]
    conditioning: Tensor | None
    out: Path


def classifier_subject(options: AttentionConfig, device: torch.device) -> Subject:
    """A classifier, its image normalised as ViT-5's are; grey ones to [-1, 1] as our data."""
    path = Path(options.classifier)
    model = open_classifier(path, heads=options.heads).to(device)
    side, channels = options.image_size or model.image_size[0], model.in_channels
    grid = model.backbone.grid((side, side))
    image, _ = open_image(options.image)
    pixels = fit_image(image, side, channels)
    images = from_uint8(torch.from_numpy(pixels[None])).to(device)
    if channels == 3:
        mean, deviation = (torch.tensor(v, device=device)[:, None, None] for v in (MEAN, DEVIATION))
        images = ((images + 1) / 2 - mean) / deviation
    return Subject(
        name=path.name,
        sees=Path(options.image).name,
        pictures={"image": pixels},
        blocks=model.blocks,
        tokens=Tokens(1, grid, model.backbone.recipe.registers),
        forward=lambda: model(images),
        conditioning=None,
        out=path.with_name(f"{path.stem}_attention"),
    )


def open_classifier(path: Path, *, heads: int | None) -> ViT5Classifier:
    """A converted folder's classifier, or an official file's."""
    if is_classifier_folder(path):
        return load_classifier(path)
    return official_classifier(read_official(path).weights, path, heads=heads)


def denoiser_subject(
    options: AttentionConfig,
    checkpoint: Checkpoint,
    *,
    model: Denoiser,
    codec: Codec,
    label: int | None,
) -> Subject:
    """A denoiser, its image encoded and noised to t as in training. label: the asked class."""
    device, trained = next(model.parameters()).device, checkpoint.config
    shape = (model.in_channels, *model.input_size)
    side, _, channels = codec.image_shape(shape)
    built_in = "digits:0" if trained.data.source == "digits" else None
    image, digit = open_image(options.image or built_in)
    label = choose_label(label, digit, checkpoint)
    pixels = fit_image(image, side, channels)

    def noise(purpose: str) -> Tensor:
        return torch.from_numpy(rng.normal(options.seed, purpose, shape, indices=[0])).to(device)

    images = from_uint8(torch.from_numpy(pixels[None])).to(device)
    latents = codec.encode(images, noise("posterior") if codec.draws_noise else None)
    t = torch.full((1,), options.t, device=device)
    path = coefficients(trained.objective.interpolant, t, latents)
    x_t = path.alpha_t * latents + path.sigma_t * noise("noise")
    names, step = checkpoint.state.class_names, checkpoint.state.step
    labels = None if label is None else torch.tensor([label], device=device)
    named = "no class" if label in (None, model.null_label) else f"class {names[label]}"
    return Subject(
        name=f"{trained.name or trained.model}, step {step}, {options.weights}",
        sees=f"{options.image or built_in} as {named}, t = {options.t:g}",
        pictures={
            "image": pixels,
            f"x_t, t = {options.t:g}": to_uint8(codec.decode(x_t))[0].cpu().numpy(),
        },
        blocks=model.blocks,
        tokens=Tokens(0, model.backbone.grid(model.input_size), model.backbone.recipe.registers),
        forward=lambda: model(x_t, t, labels),
        conditioning=conditions(model),
        out=run_of(checkpoint.folder) / SAMPLES / f"attention_{step_name(step)}",
    )


def conditions(model: Denoiser) -> Tensor:
    """The conditioning (M, D) of all pairs of a set of times and of classes."""
    device = next(model.parameters()).device
    count = max(1, min(CLASSES, model.num_classes))
    classes = torch.linspace(0, max(model.num_classes - 1, 0), count, device=device).long()
    t = torch.linspace(0, 1, TIMES, device=device)
    return model.conditioning(t.repeat_interleave(count), classes.repeat(TIMES))


def choose_label(wanted: int | None, digit: int | None, checkpoint: Checkpoint) -> int | None:
    """The wanted class, else the digit's own, else the null label; None if unconditional."""
    names = checkpoint.state.class_names
    if wanted is not None or not names:
        return wanted
    if str(digit) in names:
        return names.index(str(digit))
    if not checkpoint.config.objective.class_dropout:
        raise UserError("the model has not learned its null label (class_dropout 0); give --label")
    return len(names)


def open_image(text: str | None) -> tuple[Image.Image, int | None]:
    """An image file, or one of the built-in digits with its label."""
    if text is None:
        raise UserError("no image given: use --image FILE, or a built-in digit such as digits:0")
    name, _, number = text.rpartition(":")
    if name in BUILT_IN and not Path(text).exists():
        return _digit(name, number)
    if not Path(text).is_file():
        raise UserError(f"image {text} does not exist; give a file or a digit such as digits:0")
    return Image.fromarray(read_pixels(Path(text))), None


def _digit(name: str, number: str) -> tuple[Image.Image, int]:
    digits = Digits(BUILT_IN[name])
    if (index := index_of(number, len(digits))) is None:
        raise UserError(f"{name} has no image {brief(number)!r}; use 0 to {len(digits) - 1}")
    pixels, label = digits.load(index)
    return Image.fromarray(pixels[..., 0]), label


def fit_image(image: Image.Image, side: int, channels: int) -> np.ndarray:
    """Cropped and resized as the training images: uint8 (side, side, channels)."""
    grey = channels == 1
    pixels = center_crop(image.convert("L" if grey else "RGB"), side)
    return np.array(pixels[..., None] if grey else pixels)  # torch wants a writable copy
