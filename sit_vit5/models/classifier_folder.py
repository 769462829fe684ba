"""A classifier on disk: `classifier.json` and `model.safetensors`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from sit_vit5.errors import UserError
from sit_vit5.files import new_folder, write_json
from sit_vit5.models.classifier import ViT5Classifier
from sit_vit5.models.state_dict import load_weights
from sit_vit5.presets import backbone_from_dict
from sit_vit5.tensors import read_tensors, write_tensors

CONFIG = "classifier.json"
WEIGHTS = "model.safetensors"


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


def load_classifier(folder: Path) -> ViT5Classifier:
    """The classifier that `save_classifier` wrote, for evaluation."""
    try:
        facts = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        with torch.device("meta"):
            model = ViT5Classifier(
                backbone_from_dict(facts["backbone"], conditional=False),
                image_size=tuple(facts["image_size"]),
                in_channels=facts["in_channels"],
                num_classes=facts["num_classes"],
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} is no readable classifier folder: {error}") from None
    weights = read_tensors(folder / WEIGHTS, dtypes=(torch.float32,), remedy="convert it again")
    load_weights(model, weights, folder, assign=True)
    return model.eval().requires_grad_(False)
