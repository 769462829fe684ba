"""ViT-5 as an image classifier (Wang et al., 2026), with the weights of the released models.

Tokens: [cls] patches (row by row), registers. Learned positions are added to the patches only; cls
is not rotated; the head reads cls after the final norm.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from sit_vit5.config.presets import Backbone, backbone_from_dict
from sit_vit5.models.block import Block
from sit_vit5.models.layers import TOKEN_NORMS, Linear, PatchEmbed, resize_positions
from sit_vit5.models.rope import RopeTables
from sit_vit5.models.state_dict import load_weights
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import Count, Size, damaged, new_folder, read_json, write_json
from sit_vit5.utils.precision import at_least_fp32
from sit_vit5.utils.tensors import read_tensors, write_tensors

# Key of a state dict: channels of the images, rows and columns of the position table. Only where
# they are not those of square RGB images, so that released files and ours have the same names.
GEOMETRY = "geometry"


def stored_grid(weights: dict[str, Tensor]) -> tuple[int, int] | None:
    """Rows and columns that a state dict names, or None."""
    if GEOMETRY not in weights:
        return None
    _, rows, columns = (int(number) for number in weights[GEOMETRY])
    return rows, columns


def position_grid(weights: dict[str, Tensor], entries: int) -> tuple[int, int] | None:
    """Rows and columns of a flat position table: as stored beside it, else a square; or None."""
    rows, columns = stored_grid(weights) or (math.isqrt(entries),) * 2
    return (rows, columns) if rows * columns == entries else None


@dataclass(frozen=True)
class Features:
    """Tokens after the final norm. cls: (B, D); patches: (B, N, D); registers: (B, R, D)."""

    cls: Tensor
    patches: Tensor
    registers: Tensor


class ViT5Classifier(nn.Module):
    """Logits of images by unconditional blocks of a recipe.

    image_size: (H, W) it is trained at. Other sizes divisible by the patch run as in the official
    fine-tuning path: positions resampled bicubically, rotation by integer positions of the new
    grid; with rescale_rope these are rescaled to the extent of the trained grid. num_classes 0: no
    head. drop_path: the same rate in every block, as released.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        image_size: tuple[int, int] = (224, 224),
        in_channels: int = 3,
        num_classes: int = 1000,
        drop_path: float = 0.0,
        rescale_rope: bool = False,
    ):
        super().__init__()
        width, recipe = backbone.width, backbone.recipe
        self.backbone, self.image_size = backbone, tuple(image_size)
        self.in_channels = in_channels
        self.patch_embed = PatchEmbed(in_channels, width, backbone.patch_size)
        self.cls_token = nn.Parameter(torch.zeros(width))
        grid = backbone.grid(self.image_size)
        learned = recipe.position == "learned"
        self.positions = nn.Parameter(torch.zeros(grid[0] * grid[1], width)) if learned else None
        self.registers = (
            nn.Parameter(torch.zeros(recipe.registers, width)) if recipe.registers else None
        )
        self.blocks = nn.ModuleList(
            Block(
                width,
                backbone.heads,
                backbone.mlp_ratio,
                recipe,
                conditional=False,
                drop_path=drop_path,
            )
            for _ in range(backbone.depth)
        )
        self.norm = TOKEN_NORMS[recipe.norm](width, affine=True)
        self.rope = RopeTables(backbone, unrotated=1, trained=grid if rescale_rope else None)
        self.reset_classifier(num_classes)
        self.reset_parameters()

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes), or the cls features without a head. images: (B, C, H, W)."""
        return self.head(self.forward_features(images).cls)

    def forward_features(self, images: Tensor) -> Features:
        """cls, patches and registers after the final norm."""
        return self.split(self.norm(self.forward_blocks(images)[-1]))

    def forward_blocks(self, images: Tensor) -> list[Tensor]:
        """All tokens before the first block and after each, (B, 1 + N + R, D)."""
        x, rope = self.embed(images)
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1], None, rope))
        return states

    def embed(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens before the first block, (B, 1 + N + R, D), and the rotary table of their grid."""
        grid = self.backbone.grid(images.shape[-2:])
        patches = at_least_fp32(
            self.patch_embed(images)
        )  # (B, N, D); what the blocks add to stays fp32
        if self.positions is not None:
            patches = patches + self._positions_on(grid)
        cls = self.cls_token.expand(len(images), 1, -1)
        tokens = [cls, patches]
        if self.registers is not None:
            tokens.append(self.registers.expand(len(images), -1, -1))
        x = torch.cat(tokens, dim=1)
        return x, self.rope(grid, x.device)

    def split(self, tokens: Tensor) -> Features:
        """(B, 1 + N + R, D) into its parts."""
        registers = self.backbone.recipe.registers
        patches = tokens.shape[1] - 1 - registers
        cls, patches, registers = tokens.split([1, patches, registers], dim=1)
        return Features(cls.squeeze(1), patches, registers)

    def reset_classifier(self, num_classes: int) -> None:
        """A fresh head, where the model is and in its dtype; num_classes 0: none."""
        if num_classes < 0:
            raise UserError(f"num_classes {num_classes} must not be negative")
        self.num_classes, self.head = num_classes, nn.Identity()
        if num_classes:
            self.head = Linear(self.backbone.width, num_classes).to(self.cls_token)
            nn.init.trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The released initialisation: truncated normal of std 0.02 for matrices and tokens."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for token in (self.cls_token, self.positions, self.registers):
            if token is not None:
                nn.init.trunc_normal_(token, std=0.02)

    def geometry(self) -> dict[str, Tensor]:
        """`{GEOMETRY: (channels, rows, columns)}` where shapes alone may not tell them, else {}."""
        rows, columns = self.backbone.grid(self.image_size)
        if self.positions is not None and rows == columns and self.in_channels == 3:
            return {}
        return {GEOMETRY: torch.tensor([self.in_channels, rows, columns], dtype=torch.float32)}

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: tensor for name, tensor in self.geometry().items()})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Refuses the positions of another grid with as many patches."""
        given = state_dict.pop(prefix + GEOMETRY, None)
        positions = state_dict.get(prefix + "positions")
        if positions is not None and self.positions is not None:
            own = self.backbone.grid(self.image_size)
            grid = position_grid({} if given is None else {GEOMETRY: given}, len(positions))
            if grid != own and positions.shape == self.positions.shape:
                error_msgs.append(f"positions of a grid {grid} for {own}: resize them first")
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )

    def _positions_on(self, grid: tuple[int, int]) -> Tensor:
        own = self.backbone.grid(self.image_size)
        return self.positions if grid == own else resize_positions(self.positions, own, grid)


CONFIG = "classifier.json"
WEIGHTS = "model.safetensors"
REMEDY = "convert the official file again"


def is_classifier_folder(folder: Path) -> bool:
    """True if `save_classifier` wrote the folder."""
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
