"""The ViT-5 classifiers as models of timm; importing this module registers them.

    import sit_vit5.interop.timm
    timm.create_model("vit5_base", num_classes=10, img_size=32, patch_size=4, drop_path_rate=0.1)

A script that calls timm.create_model runs with them as
`python -m sit_vit5.interop.timm train.py --model vit5_base ...`, also under `torchrun -m`;
timm's newer train.py also imports them given `--device-modules sit_vit5.interop.timm`.

Sources, all of github.com/wangf3014/ViT-5: sizes from models_vit5.py; mean, std and the bicubic
resize from datasets.py; crop 1.0 from `--eval-crop-ratio 1.0` in the README; licence from
LICENSE; addresses of the weights from the README's table, which has small 224, base 224 and 384 and
large 224. The other tags have no address; any takes `pretrained_cfg_overlay={"file": PATH}`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import to_2tuple
from timm.models import (
    adapt_input_conv,
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
)
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sit_vit5.config.presets import SIZES, Backbone
from sit_vit5.models.block import Block
from sit_vit5.models.classifier import ViT5Classifier
from sit_vit5.models.official import vit5_state_dict
from sit_vit5.utils.errors import UserError

# Name: (tokens in timm's order, number of tokens before the patches) -> what the head reads.
POOLS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "token": lambda tokens, prefix: tokens[:, 0],
    "avg": lambda tokens, prefix: tokens[:, prefix:].mean(1),
    "": lambda tokens, prefix: tokens,
}


class TimmViT5(ViT5Classifier):
    """`ViT5Classifier` with timm's arguments and methods; the same weights under the same names.

    Tokens leave it in timm's order: cls, registers, patches. Images of any size divisible by the
    patch run, whatever dynamic_img_size; with dynamic_img_pad others too, padded with zeros at the
    right and the bottom. drop_path_rate: the same in every block, as released; drop_rate: dropout
    before the head. Not scriptable.
    """

    dynamic_img_size = True

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = False,
        **others: object,
    ):
        _refuse_others(others)
        backbone = Backbone(embed_dim, depth, num_heads, patch_size=patch_size)
        super().__init__(
            backbone,
            image_size=to_2tuple(img_size),
            in_channels=in_chans,
            num_classes=num_classes,
            drop_path=drop_path_rate,
        )
        self.dynamic_img_pad = dynamic_img_pad
        self.global_pool = _checked_pool(global_pool)
        self.head_drop = nn.Dropout(drop_rate)
        self.in_chans, self.grad_checkpointing = in_chans, False
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = 1 + backbone.recipe.registers
        self.feature_info = [
            {"module": f"blocks.{number}", "num_chs": embed_dim, "reduction": patch_size}
            for number in range(depth)
        ]

    @torch.no_grad()
    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Another size to train at: positions resampled in place. The patch stays."""
        patch = self.backbone.patch_size
        if patch_size is not None and to_2tuple(patch_size) != (patch, patch):
            raise UserError(f"patch_size {patch_size} cannot be set: the weights are for {patch}")
        if img_size is not None:
            size = to_2tuple(img_size)
            self.positions = nn.Parameter(self._positions_on(self.backbone.grid(size)).clone())
            self.image_size = size

    def embed(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """As the classifier's, of images padded to whole patches if dynamic_img_pad is set."""
        return super().embed(self._padded(images))

    def _padded(self, images: Tensor) -> Tensor:
        if not self.dynamic_img_pad:
            return images
        bottom, right = (-side % self.backbone.patch_size for side in images.shape[-2:])
        return nn.functional.pad(images, (0, right, 0, bottom))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, num_classes), or the pooled features without a head. x: (B, C, H, W)."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """All tokens after the final norm, (B, 1 + R + N, D): cls, registers, patches."""
        x, rope = self.embed(x)
        for block in self.blocks:
            x = self._run(block, x, rope)
        return self._reordered(self.norm(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits, or what the head reads, of the tokens that forward_features gives."""
        x = self.head_drop(POOLS[self.global_pool](x, self.num_prefix_tokens))
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list | tuple[Tensor, list]:
        """The patches after each block asked for, and unless intermediates_only the final tokens.

        indices: of blocks, the last n if an integer, None for all. An intermediate is (B, D, h, w),
        for NLC (B, N, D); with return_prefix_tokens a pair of it and cls and registers.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise UserError(f"output_fmt {output_fmt!r} must be NCHW or NLC")
        taken, last = feature_take_indices(len(self.blocks), indices)
        x = self._padded(x)
        grid = self.backbone.grid(x.shape[-2:])
        x, rope = self.embed(x)
        states = []
        for number, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._run(block, x, rope)
            if number in taken:
                states.append(self._reordered(self.norm(x) if norm else x))
        features = [state[:, self.num_prefix_tokens :] for state in states]  # (B, N, D)
        if output_fmt == "NCHW":
            features = [f.transpose(1, 2).unflatten(2, grid).contiguous() for f in features]
        if return_prefix_tokens:
            prefixes = [state[:, : self.num_prefix_tokens] for state in states]
            features = list(zip(features, prefixes, strict=True))
        return features if intermediates_only else (self._reordered(self.norm(x)), features)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops the blocks after the last of the indices; the indices counted from the front."""
        taken, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh head, and with global_pool another pooling; num_classes 0: no head."""
        if global_pool is not None:
            self.global_pool = _checked_pool(global_pool)
        super().reset_classifier(num_classes)

    def no_weight_decay(self) -> set[str]:
        """As released: positions, cls and registers."""
        return {"positions", "cls_token", "registers"}

    def group_matcher(self, coarse: bool = False) -> dict:
        """timm's patterns for layer-wise decay: the stem, each block, norm with the last block."""
        return {
            "stem": r"^cls_token|positions|registers|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keeps only the tokens between the blocks for the backward pass, which runs them again."""
        self.grad_checkpointing = enable

    def _run(self, block: Block, x: Tensor, rope: Tensor) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, None, rope, use_reentrant=False)
        return block(x, None, rope)

    def _reordered(self, tokens: Tensor) -> Tensor:
        """cls, patches, registers -> cls, registers, patches: timm reads patches from the end."""
        registers = self.num_prefix_tokens - 1
        return torch.cat([tokens[:, :1], tokens[:, -registers:], tokens[:, 1:-registers]], 1)


def official_weights(official: dict, model: TimmViT5) -> dict[str, Tensor]:
    """Weights of a released file, or of our own, for the model; timm fits the head.

    Resampled to its image size and its channels; the averaged weights where the file has both.
    """
    for key in ("model_ema", "model"):  # main.py's checkpoint, if timm has not opened it
        official = official.get(key) or official
    kernel = official.get("patch_embed.proj.weight")  # (D, C, p, p); ours is flat
    if kernel is not None and kernel.ndim == 4 and kernel.shape[1] != model.in_chans:
        official = official | {"patch_embed.proj.weight": adapt_input_conv(model.in_chans, kernel)}
    weights = vit5_state_dict(official, model)
    # timm loads without strict when the number of classes differs; a wrong file would pass unseen.
    missing = model.state_dict().keys() - weights.keys() - {"head.weight", "head.bias"}
    if missing:
        raise UserError(
            f"the file holds no weights of this ViT-5: {len(missing)} tensors are missing, "
            f"such as {min(missing)}"
        )
    return weights


# Arguments of timm's ViT that ViT-5 has with one value alone.
_FIXED = {
    "patch_drop_rate": 0.0,
    "pos_drop_rate": 0.0,
    "proj_drop_rate": 0.0,
    "attn_drop_rate": 0.0,
    "class_token": True,
    "reg_tokens": 4,
}


def _refuse_others(others: dict[str, object]) -> None:
    """Refuses arguments of timm's ViT with a value that ViT-5 does not have, and unknown ones."""
    for name, value in others.items():
        if name not in _FIXED:
            raise TypeError(f"TimmViT5 got an unexpected keyword argument {name!r}")
        if value != _FIXED[name]:
            raise UserError(f"{name} {value} is not possible: ViT-5 has {_FIXED[name]}; drop it")


def _checked_pool(name: str) -> str:
    if name not in POOLS:
        raise UserError(f"global_pool {name!r} must be 'token', 'avg' or '' (every token)")
    return name


def _cfg(size: int, file: str | None = None) -> dict:
    source = {"hf_hub_id": "FengWang3211/ViT-5", "hf_hub_filename": file} if file else {}
    return {
        "input_size": (3, size, size),
        "fixed_input_size": True,  # timm passes img_size, so the positions are of that size
        "num_classes": 1000,
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": None,  # `official_weights` fits the channels
        "classifier": "head",
        "license": "apache-2.0",
        **source,
    }


default_cfgs = generate_default_cfgs(
    {
        "vit5_small.in1k_224": _cfg(224, "vit5_small_patch16_224.pth"),
        "vit5_small.in1k_384": _cfg(384),
        "vit5_base.in1k_224": _cfg(224, "vit5_base_patch16_224.pth"),
        "vit5_base.in1k_384": _cfg(384, "vit5_base_patch16_384.pth"),
        "vit5_large.in1k_224": _cfg(224, "vit5_large_patch16_224.pth"),
        "vit5_large.in1k_384": _cfg(384),
        "vit5_xlarge": _cfg(224),
    }
)


def _create(name: str, size: str, pretrained: bool, options: dict) -> nn.Module:
    width, depth, heads = SIZES[size]
    return build_model_with_cfg(
        TimmViT5,
        name,
        pretrained,
        pretrained_filter_fn=official_weights,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},  # 3: the last three blocks
        **({"embed_dim": width, "depth": depth, "num_heads": heads} | options),
    )


# timm calls these with every option as a keyword; one that TimmViT5 lacks is a TypeError.
def vit5_small(pretrained: bool = False, **options: object) -> nn.Module:
    """ViT-5-S/16: 22.0M weights."""
    return _create("vit5_small", "S", pretrained, options)


def vit5_base(pretrained: bool = False, **options: object) -> nn.Module:
    """ViT-5-B/16: 86.5M weights."""
    return _create("vit5_base", "B", pretrained, options)


def vit5_large(pretrained: bool = False, **options: object) -> nn.Module:
    """ViT-5-L/16: 304M weights."""
    return _create("vit5_large", "L", pretrained, options)


def vit5_xlarge(pretrained: bool = False, **options: object) -> nn.Module:
    """ViT-5-XL/16: 449M weights; none released."""
    return _create("vit5_xlarge", "XL", pretrained, options)


def run_script(argv: list[str]) -> None:
    """Runs a script with the models registered, as `python SCRIPT ARGUMENTS` runs it without."""
    if not argv or not Path(argv[0]).is_file():
        given = f"{argv[0]} is no file" if argv else "no script is given"
        raise UserError(f"{given}; use python -m sit_vit5.interop.timm train.py --model vit5_base")
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    # Imported again under its own name, which pickles keep: the script replaces __main__.
    from importlib import import_module

    from sit_vit5.config.parse import run

    run(import_module("sit_vit5.interop.timm").run_script)
else:
    for entry in (vit5_small, vit5_base, vit5_large, vit5_xlarge):
        register_model(entry)
