"""Official weights as our folders: `python -m sit_vit5.convert SiT-XL-2-256.pt --to DIR`.

SiT and DiT become checkpoints that sampling, evaluation and `--init-from` read; a ViT-5 or DeiT-III
classifier becomes a classifier folder.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sit_vit5.cli import parse, run
from sit_vit5.config import ConvertConfig, ObjectiveConfig, TrainConfig
from sit_vit5.errors import UserError
from sit_vit5.files import check_output, file_hash
from sit_vit5.presets import model_name

if TYPE_CHECKING:
    from sit_vit5.models.official import OfficialFile

# Decay of the averages that DiT and SiT release.
OFFICIAL_DECAY = 0.9999
IMAGENET_CLASSES = 1000
# DiT's discrete diffusion (beta from 1e-4 to 0.02 in 1,000 steps) follows the vp path within 0.1 in
# the log of alpha^2 / sigma^2.
DIT_OBJECTIVE = ObjectiveConfig(interpolant="vp", prediction="noise")


def main(argv: list[str]) -> None:
    """Parse, read, write; the last line is the folder's path."""
    options = parse(ConvertConfig, argv)
    target = Path(options.to)
    if target.exists():  # before minutes of reading
        raise UserError(f"--to {target} exists; choose another folder or remove it")
    check_output(target)

    from sit_vit5.models.official import read_official

    official = read_official(Path(options.source))
    if official.is_denoiser:
        convert_denoiser(official, options, target)
    elif official.is_classifier:
        convert_classifier(official, options, target)
    else:
        raise UserError(
            f"{options.source} is neither SiT, DiT nor a ViT-5 or DeiT-III classifier: its keys "
            f"start with {', '.join(list(official.weights)[:3])}"
        )
    print(target)


def convert_classifier(official: OfficialFile, options: ConvertConfig, target: Path) -> None:
    """Writes a classifier folder."""
    from sit_vit5.models.classifier_folder import save_classifier
    from sit_vit5.models.official import official_classifier

    model = official_classifier(official.weights, official.path, heads=options.heads)
    save_classifier(model, target, source=_origin(official))


def convert_denoiser(official: OfficialFile, options: ConvertConfig, target: Path) -> None:
    """Writes a checkpoint folder; the codec is loaded to record which one the latents are of."""
    from sit_vit5.checkpoint import State, import_checkpoint
    from sit_vit5.codecs import build_codec
    from sit_vit5.models.official import official_denoiser

    dit = is_dit(options)
    build = partial(official_denoiser, source=official.path, dit=dit, heads=options.heads)
    model = build(official.weights)
    raw = None if official.raw is None else build(official.raw).state_dict()
    codec = build_codec(options.codec.name, options.codec.path)
    state = State(
        step=options.step,
        images_seen=0,
        skipped_steps=0,
        skipped_in_a_row=0,
        in_channels=model.in_channels,
        input_size=model.input_size,
        class_names=_class_names(options.class_names, model.num_classes),
        data=_origin(official),
        codec=codec.identity,
        out_channels=model.out_channels if dit else None,
        timesteps=model.timesteps,
    )
    config = TrainConfig(
        model=model_name(model.backbone) or "SiT-XL/2",  # the backbone itself is recorded too
        codec=options.codec,
        backbone=model.backbone,
        objective=DIT_OBJECTIVE if dit else ObjectiveConfig(),
    )
    averages = {OFFICIAL_DECAY: model.state_dict()}
    import_checkpoint(target, state, config, averages=averages, model=raw)


def is_dit(options: ConvertConfig) -> bool:
    """Whether the file is DiT's: their keys are the same, so the name or the user must say it."""
    if options.kind is not None:
        return options.kind == "dit"
    name = Path(options.source).name.lower()
    if ("sit" in name) == ("dit" in name):
        raise UserError(f"the name {name} does not say whether it is SiT or DiT; give --kind")
    return "dit" in name


def _origin(official: OfficialFile) -> dict:
    return {
        "source": "official weights",
        "file": official.path.name,
        "sha256": file_hash(official.path),
    }


def _class_names(file: str | None, count: int) -> tuple[str, ...]:
    """Names from a file, ImageNet's WordNet ids (the names of its folders), or numbers."""
    if file is None:
        if count != IMAGENET_CLASSES:
            return tuple(map(str, range(count)))
        from timm.data import ImageNetInfo

        return tuple(ImageNetInfo().label_names())
    names = Path(file).read_text(encoding="utf-8").split("\n")
    names = tuple(name.strip() for name in names if name.strip())
    if len(names) != count:
        raise UserError(f"--class-names {file} holds {len(names)} names, the weights {count}")
    if len(set(names)) != count:
        raise UserError(f"--class-names {file} holds a name twice")
    return names


if __name__ == "__main__":
    run(main)
