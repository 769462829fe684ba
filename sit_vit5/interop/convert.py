"""Official weights as our folders: `python -m sit_vit5 convert SiT-XL-2-256.pt --to DIR`.

SiT and DiT become checkpoints that sampling, evaluation and `--init-from` read; a ViT-5 or DeiT-III
classifier becomes a classifier folder.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sit_vit5.config import ConvertConfig, ObjectiveConfig, TrainConfig, decay_name
from sit_vit5.config.presets import model_name
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import file_hash

if TYPE_CHECKING:
    from sit_vit5.codecs import Codec
    from sit_vit5.models.denoiser import Denoiser
    from sit_vit5.models.official import OfficialFile


# Decay of the averages that DiT and SiT release.
OFFICIAL_DECAY = 0.9999
IMAGENET_CLASSES = 1000
# Methods that train SiT with code of their own: REPA, iREPA, REPA-E, REG, SRA, HASTE, DispLoss.
_BUILT_ON_SIT = re.compile(
    r"repa|(?<![a-z])(reg|sra|haste|disp(loss|ersive)?)(?![a-z])", re.IGNORECASE
)
# DiT's discrete diffusion (beta from 1e-4 to 0.02 in 1,000 steps) follows the vp path within 0.1 in
# the log of alpha^2 / sigma^2.
DIT_OBJECTIVE = ObjectiveConfig(interpolant="vp", prediction="noise")


def convert_classifier(official: OfficialFile, options: ConvertConfig, target: Path) -> None:
    """Writes a classifier folder."""
    from sit_vit5.models.classifier import save_classifier
    from sit_vit5.models.official import official_classifier

    if any(option is not None for option in (options.class_names, options.kind, options.time)):
        raise UserError("class_names, kind and time have no use for a classifier; drop them")
    model = official_classifier(official.weights, official.path, heads=options.heads)
    save_classifier(model, target, source=_origin(official))


def convert_denoiser(official: OfficialFile, options: ConvertConfig, target: Path) -> None:
    """Writes a checkpoint folder; the codec is loaded to record which one the latents are of."""
    from sit_vit5.codecs import configured_codec
    from sit_vit5.models.checkpoint import State, import_checkpoint
    from sit_vit5.models.official import official_denoiser

    dit, from_data = is_dit(official, options), is_from_data(official, options)
    table = official.weights.get("y_embedder.embedding_table.weight", ())
    names = None if options.class_names is None else read_names(options.class_names)
    build = partial(
        official_denoiser,
        source=official.path,
        dit=dit,
        from_data=from_data,
        heads=options.heads,
        # As many names as rows: trained without class dropout, there is no null label.
        num_classes=len(table) if names is not None and len(names) == len(table) else None,
    )
    model = build(official.weights)
    if names is not None and len(names) != model.num_classes:
        raise UserError(
            f"--class-names {options.class_names} holds {len(names)} names, the weights "
            f"{model.num_classes}"
        )
    raw = None if official.raw is None else build(official.raw).state_dict()
    codec = configured_codec(options.codec)
    check_codec(codec, options.codec.name, model)
    state = State(
        step=options.step,
        images_seen=0,
        skipped_steps=0,
        skipped_in_a_row=0,
        in_channels=model.in_channels,
        input_size=model.input_size,
        class_names=names or default_names(model.num_classes),
        data=_origin(official) | ({"time": "reversed"} if from_data else {}),
        codec=codec.identity,
        codec_origin=codec.origin,
        out_channels=model.out_channels if dit else None,
        timesteps=model.timesteps,
    )
    config = TrainConfig(
        model=model_name(model.backbone) or "SiT-XL/2",  # the backbone itself is recorded too
        codec=options.codec,
        backbone=model.backbone,
        objective=replace(
            DIT_OBJECTIVE if dit else ObjectiveConfig(),
            class_dropout=0.1 if model.num_classes < len(table) else 0.0,
        ),
    )
    averages = {decay_name(OFFICIAL_DECAY): model.state_dict()}
    import_checkpoint(target, state, config, averages=averages, model=raw)
    if from_data:
        print(
            "time reversed, and the velocity with it: t = 0 is noise now, the outputs are the same"
        )
    if official.dropped:
        print(f"dropped: {len(official.dropped)} tensors of REPA's projectors, which only train")


def check_codec(codec: Codec, name: str, model: Denoiser) -> None:
    """Refuses a codec whose latents of grey or colour images have other channels."""
    *sides, channels = codec.image_shape((model.in_channels, *model.input_size))
    if channels not in (1, 3) or codec.latent_shape((channels, *sides))[0] != model.in_channels:
        raise UserError(
            f"the weights are for latents of {model.in_channels} channels, the codec {name} gives "
            "others; choose one with --codec.name or --codec.path"
        )


def is_dit(official: OfficialFile, options: ConvertConfig) -> bool:
    """Whether the file is DiT's: their keys are the same, so the name or the user must say it."""
    if options.kind is not None:
        return options.kind == "dit"
    name = official.path.name
    words = set(re.findall(r"[a-z]+", name.lower()))
    sit = "sit" in words or bool(official.dropped)
    if sit == ("dit" in words):
        raise UserError(f"the name {name} does not say whether it is SiT or DiT; give --kind")
    return not sit


def is_from_data(official: OfficialFile, options: ConvertConfig) -> bool:
    """Whether a SiT runs from data (t = 0) to noise, as REPA does (sihyun-yu/REPA, loss.py).

    Projectors are REPA's. Without them only the name of a file tells what was built on it.
    """
    if is_dit(official, options):
        if options.time is not None:
            raise UserError(f"time {options.time} has no effect on DiT; drop it")
        return False
    name = official.path.name
    if options.time is None and not official.dropped and _BUILT_ON_SIT.search(name):
        raise UserError(
            f"{name} may be a SiT that runs from data to noise, as REPA's do; give --time "
            "data-to-noise, or for one that runs as the released SiT --time noise-to-data"
        )
    return options.time == "data-to-noise" or (options.time is None and bool(official.dropped))


def _origin(official: OfficialFile) -> dict:
    return {
        "source": "official weights",
        "file": official.path.name,
        "sha256": file_hash(official.path),
    }


def default_names(count: int) -> tuple[str, ...]:
    """ImageNet's WordNet ids (the names of its folders), or numbers."""
    if count != IMAGENET_CLASSES:
        return tuple(map(str, range(count)))
    from timm.data import ImageNetInfo

    return tuple(ImageNetInfo().label_names())


def read_names(file: str) -> tuple[str, ...]:
    """One class name per line."""
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"--class-names {file} is not UTF-8 text") from None
    names = tuple(line.strip() for line in lines if line.strip())
    if len(set(names)) != len(names):
        raise UserError(f"--class-names {file} holds a name twice")
    return names
