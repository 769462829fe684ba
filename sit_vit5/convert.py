"""Official weights as our folders: `python -m sit_vit5.convert SiT-XL-2-256.pt --to DIR`.

SiT becomes a checkpoint that sampling, evaluation and `--init-from` read; a ViT-5 or DeiT-III
classifier becomes a classifier folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sit_vit5.cli import parse, run
from sit_vit5.config import ConvertConfig, TrainConfig
from sit_vit5.errors import UserError
from sit_vit5.files import check_output, file_hash
from sit_vit5.presets import model_name

if TYPE_CHECKING:
    from sit_vit5.models.official import OfficialFile

# Decay of the averages that DiT and SiT release.
OFFICIAL_DECAY = 0.9999
IMAGENET_CLASSES = 1000


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

    model = official_denoiser(official.weights, official.path, heads=options.heads)
    raw = None
    if official.raw is not None:
        raw = official_denoiser(official.raw, official.path, heads=options.heads).state_dict()
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
    )
    config = TrainConfig(
        model=model_name(model.backbone) or "SiT-XL/2",  # the backbone itself is recorded too
        codec=options.codec,
        backbone=model.backbone,
    )
    averages = {OFFICIAL_DECAY: model.state_dict()}
    import_checkpoint(target, state, config, averages=averages, model=raw)


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
