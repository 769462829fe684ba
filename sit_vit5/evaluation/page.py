"""report.html: one file that shows an evaluation, without a script, a network or another file."""

from __future__ import annotations

import time
from html import escape
from pathlib import Path

from sit_vit5.config import ReportConfig
from sit_vit5.evaluation.evaluate import Evaluation
from sit_vit5.evaluation.page_pictures import classes, grid, neighbours
from sit_vit5.evaluation.protocol import (
    differences,
    guidance_of,
    is_of_imagenet,
    published_curves,
    published_rows,
    settings_of,
)
from sit_vit5.evaluation.report import metric_rows, spelled, table_rows
from sit_vit5.files import write_text
from sit_vit5.page import definitions, document, row, table
from sit_vit5.published import Published, paper_name, published

_STYLE = """
.numbers { margin-top: 14px; }
.facts dt { flex: 0 0 90px; }
.values td:nth-child(2) { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.remarks { list-style: none; margin: 14px 0 0; padding: 0; }
.remarks li { background: var(--card); border-left: 3px solid var(--rule); border-radius: 4px;
  padding: 5px 12px; margin-top: 6px; font-size: .9rem; overflow-wrap: anywhere; }
.remarks .warning { border-color: var(--bad); }
.remarks .warning b { color: var(--bad); }
.remarks .note b { color: var(--soft); font-weight: 500; }
.published { min-width: 760px; }
.published td:nth-child(n+5):nth-child(-n+6) { font-variant-numeric: tabular-nums; }
.own td { background: var(--mark); font-weight: 600; }
.tiles { display: flex; flex-wrap: wrap; gap: 6px; }
.tiles figcaption { max-width: 112px; margin: 0; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; }
.tiles img { display: block; border-radius: 4px; }
.pixels { image-rendering: pixelated; }
.blocks { display: grid; gap: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
.block { background: var(--card); border-radius: 8px; padding: 10px 12px; min-width: 0; }
.block h4 { font-size: .95rem; margin: 0 0 6px; overflow-wrap: anywhere; }
.block h4 span { font-weight: 400; }
.pair { display: grid; grid-template-columns: auto 1fr; gap: 4px 10px; }
.near { gap: 4px 22px; }
.near figcaption { max-width: 80px; }
.pair span { font-size: .8rem; color: var(--soft); }
h3 { font-size: 1rem; margin: 20px 0 8px; }
"""


def write_page(path: Path, evaluation: Evaluation, *, options: ReportConfig, seed: int) -> None:
    """Writes the page of an evaluation. seed: of the choice of samples in its grid."""
    result = evaluation.result
    name = escape("/".join(Path(result["samples"]).parts[-2:]))
    body = "\n".join(
        [
            f"<header><h1>{name}</h1><p>{result['count']:,} images against "
            f"{escape(result['reference'])}, written {time.strftime('%Y-%m-%d %H:%M:%S %z')}</p>"
            "</header>",
            f'<dl class="numbers">\n{_numbers(result)}\n</dl>',
            _remarks(result),
            _section("Values", _values(result)),
            _section("Beside published values", _published(result)),
            _section("Beside the published training curve", _curve(result)),
            _section("Samples", grid(evaluation, options.images, seed)),
            _section("Classes", classes(evaluation)),
            _section("Nearest training images", neighbours(evaluation)),
            _section("Protocol", _protocol(result)),
        ]
    )
    write_text(path, document(title=f"{name}: evaluation", style=_STYLE, body=body))


def _section(title: str, inside: str) -> str:
    return f"<h2>{title}</h2>\n{inside}" if inside else ""


def _numbers(result: dict) -> str:
    """The metrics at the top, without the number of samples in their names."""
    count = "-50K" if result["count"] == 50_000 else f"-{result['count']}"
    return definitions({name.removesuffix(count): value for name, value, _ in metric_rows(result)})


def _remarks(result: dict) -> str:
    said = [("warning", text) for text in result["warnings"]]
    said += [("note", text) for text in result["notes"]]
    items = "\n".join(
        f'<li class="{kind}"><b>{kind}</b> {escape(text)}</li>' for kind, text in said
    )
    return f'<ul class="remarks">\n{items}\n</ul>' if said else ""


def _values(result: dict) -> str:
    return table(("metric", "value", "compared with"), map(row, table_rows(result)), kind="values")


def _published(result: dict) -> str:
    """Nothing but for ImageNet at 256x256; with what keeps the values from being compared."""
    if not is_of_imagenet(result) or "frechet_distance" not in result:
        return ""
    own = Published(
        "this evaluation",
        _training(result),
        _guidance(result),
        result["frechet_distance"],
        Path(result["samples"]).name,
        score=result.get("inception_score"),
        labels=settings_of(result).get("labels", ""),
    )
    rows = [_published_row(own, kind="own"), *map(_published_row, published_rows())]
    head = ("model", "training", "guidance", "labels", "FID-50K", "IS", "source")
    unlike = "".join(f"<li>{escape(text)}</li>" for text in differences(result))
    said = f"<p>Not comparable as it stands:</p><ul>{unlike}</ul>" if unlike else ""
    return (
        '<p class="soft">As their authors report them, with samplers and evaluators of their own; '
        "those of figure 6 are read off it. Balanced labels lower an FID by about 0.1 (RAE's "
        f"README).</p>{said}{table(head, rows, kind='published')}"
    )


def _curve(result: dict) -> str:
    """FID by training step without guidance, of the same backbone and of its rival."""
    curves, step = published_curves(result), settings_of(result).get("step")
    if not curves or "frechet_distance" not in result or not isinstance(step, int):
        return ""
    rows = {f"{paper_name(name)}, published": curve for name, curve in curves.items()}
    rows["this evaluation"] = {step: result["frechet_distance"]}
    steps = sorted({step for curve in rows.values() for step in curve})
    cells = (
        (name, *(f"{curve[at]:.1f}" if at in curve else "" for at in steps))
        for name, curve in rows.items()
    )
    head = ("FID-50K without guidance, steps", *(f"{at:,}" for at in steps))
    source = f"{published().curve_source}, {published().curve_reading}"
    return f'<p class="soft">{escape(source)}.</p>{table(head, map(row, cells))}'


def _published_row(entry: Published, kind: str = "") -> str:
    fid = f"{entry.fid:.2f}" if entry.fid < 10 else f"{entry.fid:.1f}"
    score = "" if entry.score is None else f"{entry.score:.1f}"
    cells = (
        entry.model, entry.training, entry.guidance, entry.labels, fid, score, entry.source,
    )  # fmt: skip
    return row(cells, kind=kind)


def _training(result: dict) -> str:
    step = settings_of(result).get("step")
    return f"{step:,} steps" if isinstance(step, int) else "not known"


def _guidance(result: dict) -> str:
    guidance = guidance_of(result)
    if not guidance:
        return "not known"
    return "none" if guidance.get("scale") == 1 else ", ".join(spelled(guidance))


def _protocol(result: dict) -> str:
    """Everything that a number depends on, and the command."""
    facts = {
        "samples": _file(result["samples"], result["samples_sha256"]),
        "images": f"{result['count']:,} of {' x '.join(map(str, result['image_shape']))}"
        + "".join(f", {count:,} {kind}" for kind, count in result["samples_formats"].items()),
        **_making(result),
        "reference": _file(result["reference"], result["reference_sha256"]),
        "of images": _or_unknown(result["reference_count"]),
        "extractor": ", ".join(spelled(result["extractor"])),
        "device": result["device"],
        "versions": ", ".join(spelled(result["versions"])),
        "seconds": ", ".join(spelled(result["seconds"])),
    }
    return (
        f'<dl class="facts">\n{definitions(facts)}\n</dl>\n<pre>{escape(result["command"])}</pre>'
    )


def _making(result: dict) -> dict[str, str]:
    """How the samples were made, from the sampler's manifest."""
    manifest, settings = result["manifest"], settings_of(result)
    if not manifest:
        return {"made by": "not known: no manifest beside the samples"}
    weights = settings.get("weights_sha256")
    facts = {
        "model": settings.get("model"),
        "checkpoint": manifest.get("checkpoint"),
        "step": settings.get("step"),
        "weights": settings.get("weights") and _file(settings["weights"], weights),
        "sampler": ", ".join(spelled(settings.get("sampler") or {})),
        "cost": _cost(manifest),
        "labels": settings.get("labels"),
        "codec": ", ".join(spelled(settings.get("codec") or {})),
        "made on": ", ".join(
            [manifest.get("device") or "?", *spelled(manifest.get("versions") or {})]
        ),
        "made by": manifest.get("command"),
    }
    return {term: str(text) for term, text in facts.items() if text not in (None, "")}


def _cost(manifest: dict) -> str | None:
    evaluations = manifest.get("evaluations_per_image")
    if evaluations is None:
        return None
    passes = manifest.get("network_passes_per_image")
    return f"{evaluations} velocity evaluations (NFE), {passes} network passes per image"


def _file(name: str, sha256: str | None) -> str:
    return f"{name}, SHA-256 {sha256}" if sha256 else name


def _or_unknown(count: int | None) -> str:
    return "not told by the file" if count is None else f"{count:,}"
