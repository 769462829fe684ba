"""Images by index: image i is a function of (seed, i, label, settings) and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sit_vit5 import rng
from sit_vit5.codecs import Codec, to_uint8
from sit_vit5.errors import UserError, choose
from sit_vit5.models.denoiser import Denoiser, check_labels
from sit_vit5.models.layers import set_attention
from sit_vit5.sampling.guidance import VelocityField
from sit_vit5.sampling.ode import SAMPLERS, uniform_grid


@dataclass(frozen=True)
class Images:
    """uint8 (B, H, W, C) on the CPU, and what each image cost."""

    pixels: Tensor
    evaluations: int
    passes: int


@dataclass(frozen=True)
class Settings:
    """The choices that decide an image, apart from weights and label."""

    method: str
    steps: int
    guidance_scale: float
    precision: str
    attention: str
    seed: int

    def __post_init__(self) -> None:
        choose("sampling method", self.method, SAMPLERS)


@torch.inference_mode()
def sample_images(
    model: Denoiser,
    codec: Codec,
    *,
    indices: Sequence[int],
    labels: Sequence[int],
    settings: Settings,
) -> Images:
    """The images of the given indices. labels: one per index, in 0..num_classes-1."""
    if model.num_classes:
        check_labels(list(labels), model.num_classes)
    set_attention(model, settings.attention)
    device = next(model.parameters()).device
    shape = (model.in_channels, *model.input_size)
    noise = torch.from_numpy(rng.normal(settings.seed, "sample", shape, indices=indices))
    field = VelocityField(
        model,
        torch.tensor(labels, device=device),
        guidance_scale=settings.guidance_scale,
        precision=settings.precision,
    )
    solver = SAMPLERS[settings.method]
    images = codec.decode(solver(field, noise.to(device), uniform_grid(settings.steps)))
    if not images.isfinite().all():
        raise UserError(
            "the network or decoder returned non-finite images; none was written; check the "
            "checkpoint, lower guidance_scale or use --precision fp32"
        )
    return Images(to_uint8(images).cpu(), field.evaluations, field.passes)


def choose_labels(
    indices: Sequence[int], *, classes: Sequence[int], mode: str, seed: int
) -> list[int]:
    """Label of each image index: `balanced` cycles through the classes, `random` draws one.

    classes: the labels to choose from; empty for an unconditional model (all labels 0).
    """
    if not classes:
        return [0] * len(indices)
    if mode == "balanced":
        return [classes[index % len(classes)] for index in indices]
    draws = [rng.generator(seed, "label", 0, index).integers(len(classes)) for index in indices]
    return [classes[draw] for draw in draws]


def find_classes(wanted: Sequence[str], class_names: Sequence[str]) -> list[int]:
    """Labels of classes given by name or number; all classes if none is given."""
    if wanted and not class_names:
        raise UserError("the model is unconditional: it has no classes to choose from")
    numbered = all(name.isdecimal() for name in class_names)  # then a number is a name
    labels = []
    for text in wanted:
        if text in class_names:
            labels.append(list(class_names).index(text))
        elif text.isdecimal() and int(text) < len(class_names) and not numbered:
            labels.append(int(text))
        else:
            raise UserError(
                f"class {text!r} is no class name{'' if numbered else ' or number'}; "
                f"classes: {', '.join(class_names[:12])}{', ...' if len(class_names) > 12 else ''}"
            )
    return labels or list(range(len(class_names)))
