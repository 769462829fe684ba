"""The denoiser in diffusers' shape: `save_pretrained`, `from_pretrained`, `push_to_hub`."""

from __future__ import annotations

from dataclasses import asdict

from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor

from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.state_dict import fold_gammas
from sit_vit5.presets import backbone_from_dict


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
        backbone: dict,
        in_channels: int = 4,
        input_size: tuple[int, int] = (32, 32),
        num_classes: int = 1000,
        out_channels: int | None = None,
        timesteps: int = 0,
    ):
        super().__init__(
            backbone_from_dict(backbone),
            in_channels=in_channels,
            input_size=input_size,
            num_classes=num_classes,
            out_channels=out_channels,
            timesteps=timesteps,
        )

        self.register_to_config(backbone=asdict(self.backbone))  # an older one under present names

    def _fix_state_dict_keys_on_load(self, state_dict: dict[str, Tensor]) -> None:
        """Called by diffusers with the weights of a file, in place, before they are loaded."""
        folded = fold_gammas(state_dict, self.backbone.recipe)
        state_dict.clear()
        state_dict.update(folded)

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
        self.recompute = True

    def disable_gradient_checkpointing(self) -> None:
        """Keeps everything for the backward pass."""
        self.recompute = False
