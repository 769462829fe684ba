"""A checkpoint as diffusers' folder: `python -m sit_vit5 export --checkpoint RUN --to DIR`.

    model_index.json  transformer/  vae/ (a model of latents)  README.md  pipeline.py

transformer/diffusion_pytorch_model.safetensors holds the chosen weights and nothing else.
"""

from __future__ import annotations

from pathlib import Path

from sit_vit5.config import ExportConfig
from sit_vit5.config.parse import parse
from sit_vit5.interop.export import CARD, FINDER, FINDER_FILE, build_pipeline, model_card
from sit_vit5.utils.files import check_new_folder, new_folder, sync, write_text


def main(argv: list[str]) -> None:
    """Parse, open, write; the last line is the folder's path."""
    options = parse(ExportConfig, argv)
    target = Path(options.to)
    check_new_folder(target)

    from sit_vit5.models.checkpoint import open_checkpoint
    from sit_vit5.utils.tensors import writing

    checkpoint = open_checkpoint(options.checkpoint)
    pipeline = build_pipeline(checkpoint, options)
    card = model_card(checkpoint, pipeline, options)
    with new_folder(target) as partial:
        with writing():
            pipeline.save_pretrained(partial)
        write_text(partial / CARD, card)
        write_text(partial / FINDER_FILE, FINDER)
        for path in partial.rglob("*"):
            sync(path)
    print(target)
