"""Any model of timm as an extractor, and DINOv2 by name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from sit_vit5.metrics.features.base import POOL, check_outputs, image_tensor
from sit_vit5.metrics.metric import default_device
from sit_vit5.utils.errors import UserError, brief, listed, nearest
from sit_vit5.utils.files import file_hash
from sit_vit5.utils.precision import tf32_off
from sit_vit5.utils.tensors import FLOATS, check_values, read_weights

DINOV2, DINOV2_SIDE = "vit_large_patch14_dinov2.lvd142m", 224


class TimmModel:
    """The pooled features of a timm model, fp32, of images resized to its own size.

    Resizing is timm's for the model (mostly bicubic), antialiased, to its input size whatever the
    aspect, without a crop, so that no part of an image escapes; then its mean and deviation.
    """

    outputs = (POOL,)

    def __init__(
        self,
        model: str,
        weights: str | None = None,
        *,
        option: str = "--weights",
        side: int | None = None,
    ):
        path = find_timm_weights(model, weights, option=option)
        self.device = default_device()
        self.network = _load(model, path, side).to(self.device).eval()
        config = self.network.pretrained_cfg
        self.size = (side, side) if side else tuple(config["input_size"][1:])
        self.mode = config["interpolation"] if config["interpolation"] != "random" else "bicubic"
        self.mean, self.deviation = (
            torch.tensor(config[key], device=self.device)[:, None, None] for key in ("mean", "std")
        )
        self.identity = {
            "features": f"timm:{model}",
            "weights_sha256": file_hash(path),
            "size": list(self.size),
            "resize": f"{self.mode}, antialiased",
        }

    @torch.inference_mode()
    def __call__(
        self, images: np.ndarray, outputs: Sequence[str] = (POOL,)
    ) -> dict[str, np.ndarray]:
        check_outputs(outputs, self.outputs, self.identity["features"])
        with tf32_off():
            values = image_tensor(images, self.device).float() / 255
            values = functional.interpolate(values, self.size, mode=self.mode, antialias=True)
            # Bicubic weights overshoot; an image library would clip as well.
            values = (values.clamp(0, 1) - self.mean) / self.deviation
            return {POOL: self.network(values).float().flatten(1).cpu().numpy()}


class DINOv2(TimmModel):
    """The cls token of DINOv2 ViT-L/14 at 224 pixels, 1,024 numbers (Stein et al., 2023).

    From timm's port of the weights: torch-fidelity and dgm-eval fetch the model's code by
    torch.hub. Their resizing and position tables differ in detail: compare values of one tool only.
    """

    def __init__(self, weights: str | None = None, *, option: str = "--weights"):
        super().__init__(DINOV2, weights, option=option, side=DINOV2_SIDE)
        self.identity = {"features": "dinov2", "model": DINOV2, **_without_name(self.identity)}


def find_timm_weights(model: str, path: str | None, *, option: str = "--weights") -> Path:
    """The given file, or the model's in Hugging Face's cache; never a download by surprise.

    option: the command's option for the file.
    """
    # Imported here: timm takes seconds.
    import timm
    from huggingface_hub import try_to_load_from_cache

    if not timm.is_model(model):
        known = nearest(model, timm.list_models() + timm.list_pretrained())
        raise UserError(f"timm has no model {model!r}; nearest: {known}")
    if path is not None:
        if not Path(path).is_file():
            raise UserError(f"weights {path} do not exist")
        return Path(path)
    config = timm.get_pretrained_cfg(model)
    if config is None or not config.hf_hub_id:
        raise UserError(f"timm has no published weights of {model}; give a file by {option} FILE")
    hub, name = config.hf_hub_id, config.hf_hub_filename or "model.safetensors"
    found = try_to_load_from_cache(hub, name)
    if not isinstance(found, str):
        raise UserError(
            f"weights of {model} are not in Hugging Face's cache; run `hf download {hub} {name}`, "
            f"or download https://huggingface.co/{hub}/resolve/main/{name} and give it by "
            f"{option} FILE"
        )
    return Path(found)


def _load(model: str, path: Path, side: int | None) -> torch.nn.Module:
    """The model without its head. Refuses a file that lacks a weight or holds foreign ones."""
    import timm

    what = f"a weights file of timm's {model}"
    weights = _read(path, remedy=f"download {what} again")
    network = timm.create_model(model, num_classes=0, **({"img_size": side} if side else {}))
    # By timm's convention the module of a model knows the older names and sizes of its weights.
    rename = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
    own = network.state_dict()
    cast = [
        k
        for k, t in weights.items()
        if k in own and t.is_floating_point() != own[k].is_floating_point()
    ]
    if cast:
        raise UserError(f"{path} is not {what}: {listed(cast, most=3)} of another type")
    try:
        keys = network.load_state_dict(
            rename(weights, network) if rename else weights, strict=False
        )
    except Exception as error:  # of foreign weights: many types
        raise UserError(f"{path} is not {what}: {brief(error)}") from None
    heads = np.atleast_1d(network.pretrained_cfg["classifier"] or "head")
    foreign = [key for key in keys.unexpected_keys if not key.startswith(tuple(heads))]
    if keys.missing_keys or foreign:
        raise UserError(
            f"{path} is not {what}: {len(keys.missing_keys)} weights are missing, {len(foreign)} "
            f"unknown, such as {(keys.missing_keys + foreign)[0]}"
        )
    return network


def _read(path: Path, *, remedy: str) -> dict[str, torch.Tensor]:
    """The tensors of a file, the EMA weights of timm's trainer where it has both."""
    from timm.models import clean_state_dict

    content = read_weights(path, remedy=remedy)
    for key in ("state_dict_ema", "model_ema", "state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    tensors = check_values(content, path, dtypes=(*FLOATS, torch.int64), remedy=remedy)
    return clean_state_dict(tensors)


def _without_name(identity: dict) -> dict:
    return {key: value for key, value in identity.items() if key != "features"}
