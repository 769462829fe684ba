"""A classifier on disk: `classifier.json` and `model.safetensors`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from sit_vit5.errors import UserError
from sit_vit5.files import Count, Size, damaged, new_folder, read_json, write_json
from sit_vit5.models.classifier import ViT5Classifier
from sit_vit5.models.state_dict import load_weights
from sit_vit5.presets import backbone_from_dict
from sit_vit5.tensors import read_tensors, write_tensors

CONFIG = "classifier.json"
WEIGHTS = "model.safetensors"
REMEDY = "convert the official file again"


def is_classifier_folder(folder: Path) -> bool:
    """Whether `save_classifier` wrote the folder."""
    return (folder / CONFIG).is_file()


def save_classifier(model: ViT5Classifier, folder: Path, *, source: dict) -> None:
    """Writes a new folder, whole or not at all. source: where the weights come from."""
    with new_folder(folder) as partial:
        partial.mkdir(parents=True)
        write_tensors(partial / WEIGHTS, model.state_dict())
        facts = {
            "backbone": asdict(model.backbone),
            "image_size": list(model.image_size),
            "in_channels": model.in_channels,
            "num_classes": model.num_classes,
            "source": source,
        }
        write_json(partial / CONFIG, facts)


@dataclass(frozen=True)
class _Facts:
    """`classifier.json`."""

    backbone: dict
    image_size: tuple[Size, Size]
    in_channels: Size
    num_classes: Count
    source: dict = field(default_factory=dict)


def load_classifier(folder: Path) -> ViT5Classifier:
    """The classifier that `save_classifier` wrote, for evaluation."""
    file = folder / CONFIG
    facts = read_json(file, _Facts, remedy=REMEDY)
    backbone = backbone_from_dict(facts.backbone, conditional=False, source=file, remedy=REMEDY)
    try:
        with torch.device("meta"):
            model = ViT5Classifier(
                backbone,
                image_size=facts.image_size,
                in_channels=facts.in_channels,
                num_classes=facts.num_classes,
            )
    except UserError as error:
        raise UserError(damaged(file, str(error), REMEDY)) from None
    weights = read_tensors(folder / WEIGHTS, dtypes=(torch.float32,), remedy=REMEDY)
    load_weights(model, weights | model.geometry(), folder, assign=True)
    return model.eval().requires_grad_(False)
