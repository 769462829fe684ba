"""The denoiser in diffusers' shape: `save_pretrained`, `from_pretrained`, `push_to_hub`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor

from sit_vit5.config.presets import backbone_from_dict
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.state_dict import check_tensors, fold_gammas
from sit_vit5.utils.files import Count, Size, parse_json, read_json
from sit_vit5.utils.tensors import read_diffusers

REMEDY = "export the checkpoint again, or download the folder again"


@dataclass(frozen=True)
class _Card:
    """`transformer/config.json`."""

    backbone: dict
    in_channels: Size
    input_size: tuple[Size, Size]
    num_classes: Count
    out_channels: Size | None
    timesteps: Count


_FIELDS = {field.name for field in fields(_Card)}


class ViT5SiT(Denoiser, ModelMixin, ConfigMixin):
    """A `Denoiser` that diffusers can store: the same weights, names and options.

    forward(x_t, t, labels) is the denoiser's, t from 0 (noise) to 1 (data). backbone: the fields of
    `presets.Backbone` as nested plain values. Rotary tables are computed, never stored, so that
    loading with low memory cannot leave them empty.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ("Block",)
    _repeated_blocks = ("Block",)

    @register_to_config
    def __init__(
        self,
        backbone: dict | None = None,
        in_channels: int = 4,
        input_size: tuple[int, int] = (32, 32),
        num_classes: int = 1000,
        out_channels: int | None = None,
        timesteps: int = 0,
    ):
        given = {
            "backbone": backbone,
            "in_channels": in_channels,
            "input_size": input_size,
            "num_classes": num_classes,
            "out_channels": out_channels,
            "timesteps": timesteps,
        }
        card = parse_json(json.dumps(given), _Card, source="transformer/config.json", remedy=REMEDY)
        super().__init__(
            backbone_from_dict(card.backbone),
            in_channels=card.in_channels,
            input_size=card.input_size,
            num_classes=card.num_classes,
            out_channels=card.out_channels,
            timesteps=card.timesteps,
        )
        self.register_to_config(backbone=asdict(self.backbone))  # an older one under present names

    def _fix_state_dict_keys_on_load(self, state_dict: dict[str, Tensor]) -> None:
        """Called by diffusers with the weights of a file, in place, before they are loaded."""
        folded = fold_gammas(state_dict, self.backbone.recipe)
        state_dict.clear()
        state_dict.update(folded)

    @classmethod
    def from_pretrained(cls, source: str | Path, **options: object) -> ViT5SiT:
        """As diffusers' own; a local folder is checked first, and nothing is left random."""
        folder = Path(source, options.get("subfolder") or "")
        if folder.is_dir():
            card = read_json(folder / "config.json", remedy=REMEDY)
            with torch.device("meta"):
                model = cls(**{k: v for k, v in card.items() if k in _FIELDS})
            weights = fold_gammas(read_diffusers(folder, remedy=REMEDY), model.backbone.recipe)
            if weights:  # diffusers casts what is no float32
                cast = {key: t.to("meta", torch.float32) for key, t in weights.items()}
                check_tensors(cast, model.state_dict(), folder)
        return super().from_pretrained(source, **options)

    @classmethod
    def from_denoiser(cls, model: Denoiser) -> ViT5SiT:
        """The same network; it shares the denoiser's tensors."""
        ours = cls(
            backbone=asdict(model.backbone),
            in_channels=model.in_channels,
            input_size=model.input_size,
            num_classes=model.num_classes,
            out_channels=model.out_channels,
            timesteps=model.timesteps,
        )
        ours.load_state_dict(model.state_dict(), assign=True)
        return ours.train(model.training)

    def enable_gradient_checkpointing(self) -> None:
        """Keeps only the blocks' inputs for the backward pass."""
        self.activation_checkpointing = True

    def disable_gradient_checkpointing(self) -> None:
        """Keeps everything for the backward pass."""
        self.activation_checkpointing = False
