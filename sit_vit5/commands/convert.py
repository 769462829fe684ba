"""Official weights as our folders: `python -m sit_vit5 convert SiT-XL-2-256.pt --to DIR`.

SiT and DiT become checkpoints that sampling, evaluation and `--init-from` read; a ViT-5 or DeiT-III
classifier becomes a classifier folder.
"""

from __future__ import annotations

from pathlib import Path

from sit_vit5.config import ConvertConfig
from sit_vit5.config.parse import parse
from sit_vit5.interop.convert import convert_classifier, convert_denoiser
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import check_new_folder


def main(argv: list[str]) -> None:
    """Parse, read, write; the last line is the folder's path."""
    options = parse(ConvertConfig, argv)
    target = Path(options.to)
    check_new_folder(target)

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
