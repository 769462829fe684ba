"""Draws attention maps and suppressed channels: `python evaluate/attention.py --checkpoint RUN`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sit_vit5.config import AttentionConfig, SamplerConfig
from sit_vit5.config.parse import parse

if TYPE_CHECKING:
    import torch

    from sit_vit5.analysis.attention import Subject


def open_subject(options: AttentionConfig, device: torch.device) -> Subject:
    """The network and image that the options name."""
    from sit_vit5.analysis.attention import classifier_subject, denoiser_subject
    from sit_vit5.sampling.generator import find_classes
    from sit_vit5.sampling.load import load

    if options.checkpoint is None:
        return classifier_subject(options, device)
    sampler = SamplerConfig(
        options.checkpoint, weights=options.weights, codec_path=options.codec_path
    )
    loaded = load(sampler, device)
    label = find_classes([options.label], loaded.class_names)[0] if options.label else None
    return denoiser_subject(
        options,
        loaded.checkpoint,
        model=loaded.generator.model,
        codec=loaded.generator.codec,
        label=label,
    )


def main(argv: list[str]) -> None:
    """Parse, load, look, draw; the last lines are the pictures' paths."""
    options = parse(AttentionConfig, argv)

    import torch

    from sit_vit5.analysis.attention import (
        block_maps,
        branch_gates,
        draw_gates,
        draw_maps,
        gates_table,
    )
    from sit_vit5.utils.distributed import join_processes
    from sit_vit5.utils.files import check_output

    with torch.inference_mode():
        subject = open_subject(options, join_processes().device)
        out = Path(options.out or subject.out)
        maps_png, gates_png = out / "attention.png", out / "gates.png"
        check_output(maps_png)
        rows = block_maps(
            subject.forward,
            subject.blocks,
            subject.tokens,
            numbers=options.blocks,
            head=options.head,
        )
        gates = branch_gates(subject.blocks, subject.conditioning, fraction=options.suppressed)
    heads = "mean over heads" if options.head is None else f"head {options.head}"
    legend = f"attention to the patches, {heads}; dark is 0, yellow a map's largest"
    shown = "" if subject.conditioning is None else ", mean and range over t and classes"
    draw_maps(
        maps_png,
        rows,
        subject.pictures,
        title=f"{subject.name}: {subject.sees}\n{legend}",
        interpolation=options.interpolation,
    )
    draw_gates(
        gates_png,
        gates,
        title=f"{subject.name}: suppressed channels{shown}",
        fraction=options.suppressed,
    )
    print(gates_table(gates, fraction=options.suppressed))
    print(maps_png, gates_png, sep="\n")
