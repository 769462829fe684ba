"""The result for people: a table on the screen, JSON on the disk."""

from __future__ import annotations

from pathlib import Path

from sit_vit5.config import MetricsConfig
from sit_vit5.errors import UserError
from sit_vit5.evaluation.inputs import BUILT_IN, manifest_path

NAMES = {"inception": "FID", "pixels": "Frechet distance of pixels"}


def metric_name(features: str, count: int) -> str:
    """The distance's name with the number of samples, on which its value depends."""
    return f"{NAMES[features]}-{'50K' if count == 50_000 else count}"


def report(result: dict) -> str:
    """The result as a table: name with the number of samples, value, what it was compared with."""
    name = metric_name(result["extractor"]["features"], result["count"])
    reference = result["reference"]
    rows = [(name, f"{result['frechet_distance']:.4f}", reference)]
    if floor := result.get("floor"):
        value = f"{floor['frechet_distance']:.4f}"
        rows.append((f"floor: {floor['samples']}-{floor['count']}", value, reference))
    if agreement := result.get("agreement"):
        for what, share in (
            ("samples classified as asked", agreement["samples"]),
            ("real held-out classified right", agreement["held_out"]),
        ):
            rows.append((what, f"{share:.1%}", agreement["classifier"]))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]}" for row in rows]
    sampler = ((result["manifest"] or {}).get("settings") or {}).get("sampler")
    if sampler:
        lines.append("sampler: " + ", ".join(_said(sampler)))
    return "\n".join(lines + [f"note: {note}" for note in result["notes"]])


def _said(settings: dict, prefix: str = "") -> list[str]:
    """`name value` of all settings that are set, those of groups as `guidance.scale 1.5`."""
    said = []
    for key, value in settings.items():
        if isinstance(value, dict):
            said += _said(value, f"{prefix}{key}.")
        elif value is not None:
            said.append(f"{prefix}{key} {value}")
    return said


def json_path(options: MetricsConfig) -> Path:
    """Where the JSON goes: as asked; or metrics.json beside samples.npz and in a folder of images,
    NAME.metrics.json beside any other archive and in the current folder for a built-in set."""
    samples = Path(options.samples)
    if options.out:
        out = Path(options.out)
    elif options.samples in BUILT_IN:
        out = Path(f"{options.samples.replace(':', '-')}.metrics.json")
    elif samples.is_dir():
        out = samples / "metrics.json"
    else:
        own = samples.name != "samples.npz"
        out = samples.with_name(f"{samples.stem}.metrics.json" if own else "metrics.json")
    if out.suffix != ".json":
        raise UserError(f"--out {out} must end in .json")
    if not samples.is_dir() and out.resolve() == manifest_path(options.samples).resolve():
        raise UserError(f"--out {out} is the samples' manifest; choose another name")
    return out
