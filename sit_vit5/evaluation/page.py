"""report.html: one file that shows an evaluation, without a script, a network or another file."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from sit_vit5.config import ReportConfig
from sit_vit5.evaluation.evaluate import Evaluation
from sit_vit5.evaluation.inputs import Manifest
from sit_vit5.evaluation.per_class import BEYOND
from sit_vit5.evaluation.protocol import (
    differences,
    guidance_of,
    is_of_imagenet,
    published_curves,
    published_rows,
    settings_of,
)
from sit_vit5.evaluation.real_sets import samples_numbers
from sit_vit5.evaluation.report import metric_rows, spelled, table_rows
from sit_vit5.metrics.image_sets import ImageSet
from sit_vit5.report.html import definitions, document, row, table, tile
from sit_vit5.report.published import Published, paper_name, published
from sit_vit5.utils import rng
from sit_vit5.utils.files import write_text

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
    """Write the page of an evaluation. seed: selects the samples in its grid."""
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
    """Published values, for ImageNet at 256x256 only, and differences that prevent a comparison."""
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
    """FID by training step without guidance, of the same backbone and of the other one."""
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
    """Facts on the sampling, from the sampler's manifest."""
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


# Sides in CSS pixels: grid, neighbours, classes.
SIDE, NEAR_SIDE, CLASS_SIDE = 112, 80, 64
# Classes shown at either end, and images of each side of one.
ENDS, OF_EACH = 4, 6


def grid(evaluation: Evaluation, count: int, seed: int) -> str:
    """Random samples, each with the name of its class label."""
    samples, names = evaluation.samples, _names(evaluation.manifest)
    order = rng.generator(seed, "samples in the report").permutation(samples.count)
    chosen = np.sort(order[:count])
    tiles = _tiles(samples, chosen, SIDE, [names.get(int(n), str(n)) for n in chosen])
    said = "their class" if names else "their number"
    return (
        f'<p class="soft">{len(chosen)} of {samples.count:,}, drawn at random (seed {seed}), not '
        f"chosen; with {said}</p>{tiles}"
    )


def classes(evaluation: Evaluation) -> str:
    """The worst and the best classes with images of both sides; all of them in a table."""
    found = evaluation.result["classes"]
    if "left_out" in found:
        return f'<p class="soft">No distances per class: {escape(found["left_out"])}.</p>'
    scores = np.array(found["scores"])
    order = np.argsort(-scores, kind="stable")
    worst = order[: min(ENDS, -(-len(order) // 2))]
    best = order[len(worst) :][-ENDS:][::-1]
    names = evaluation.manifest.class_names
    return (
        f"<p><b>{found['beyond_noise']} of {len(scores)}</b> classes are further from the real "
        f"ones of {escape(found['reference'])} than {BEYOND} times the noise.</p>"
        '<p class="soft">Kernel distance (unbiased, as KID) between the samples and the real '
        "images of a class, in units of the standard deviation that it would have if both came "
        "from one distribution: 0 on average, rarely beyond 3 either way. Few images make it "
        "uncertain; they do not make it large.</p>"
        f"{_unmatched(evaluation)}"
        f"{_ends('Worst', worst, evaluation, names)}{_ends('Best', best, evaluation, names)}"
        f"<details><summary>all classes</summary>{_table(found, order, names)}</details>"
    )


def _unmatched(evaluation: Evaluation) -> str:
    """Remarks on a mismatch between the classes of the two sides."""
    matching = evaluation.classes.matching
    remarks = [f"<b>{escape(matching.warning)}</b>"] if matching.warning else []
    remarks += [escape(matching.note)] if matching.note else []
    return "".join(f"<p>{remark}</p>" for remark in remarks)


def _ends(title: str, places: np.ndarray, evaluation: Evaluation, names: Sequence[str]) -> str:
    """Blocks of the classes at these positions in the columns."""
    if not len(places):
        return ""
    found, real = evaluation.result["classes"], evaluation.classes
    sides = (
        ("samples", evaluation.samples, np.array(evaluation.manifest.labels)),
        ("real", real.images, samples_numbers(real, names)),
    )
    blocks, shown = [], []
    for place in places.tolist():
        label = found["labels"][place]
        pictures = "".join(
            f"<span>{what}</span>"
            + _tiles(images, np.flatnonzero(labels == label)[:OF_EACH], CLASS_SIDE)
            for what, images, labels in sides
        )
        score = f'<span class="soft">{found["scores"][place]:.1f} x noise</span>'
        shown += np.flatnonzero(sides[0][2] == label)[:OF_EACH].tolist()
        heading = f"<h4>{escape(_class(label, names))} {score}</h4>"
        blocks.append(f'<div class="block">{heading}<div class="pair">{pictures}</div></div>')
    return f'<h3>{title}</h3><div class="blocks">{"".join(blocks)}</div>' + _again(
        evaluation, shown
    )


def _again(evaluation: Evaluation, numbers: Sequence[int]) -> str:
    """The command that makes these samples again, if `sample/generate.py` made them."""
    command = command_of(evaluation.manifest, sorted(set(numbers)))
    if not command:
        return ""
    return (
        '<p class="soft">The same images again, to the bit; other options such as '
        f"--guidance.scale change them alone:</p><pre>{escape(command)}</pre>"
    )


def command_of(manifest: Manifest | None, numbers: Sequence[int]) -> str:
    """The command in a manifest, for the samples of these indices only; "" if it is not ours."""
    facts = manifest.facts if manifest else {}
    try:
        words = shlex.split(facts.get("command") or "")
    except ValueError:  # not a command line
        return ""
    if not words or not words[0].endswith("generate.py"):
        return ""
    kept, dropped = [], False
    for word in words[1:]:
        if word.startswith("--"):
            dropped = word.partition("=")[0] in ("--indices", "--out", "--png")
        if not dropped:
            kept.append(word)
    known = (facts.get("settings") or {}).get("indices") or range(len(manifest.labels))
    chosen = [str(known[number]) for number in numbers if number < len(known)]
    return shlex.join(["python", words[0], *kept, "--indices", *chosen, "--png", "True"])


def _table(found: dict, order: np.ndarray, names: Sequence[str]) -> str:
    rows = [
        (
            _class(found["labels"][n], names),
            f"{found['scores'][n]:.2f}",
            f"{found['distances'][n]:.4g}",
            f"{found['samples'][n]:,}",
            f"{found['real'][n]:,}",
        )
        for n in order.tolist()
    ]
    head = ("class", "x noise", "distance", "samples", "real images")
    return table(head, map(row, rows))


def neighbours(evaluation: Evaluation) -> str:
    """Summary of copies, then samples beside their nearest training images."""
    found = evaluation.result.get("neighbours")
    if not found:
        return (
            '<p class="soft">Not looked for: <code>--neighbours DATA</code> compares samples with '
            "the images that the model was trained on.</p>"
        )
    copies = (
        f"<b>{found['copies']:,} of {evaluation.result['count']:,}</b> samples are training images "
        "pixel by pixel"
    )
    return (
        f"<p>{copies}. <b>{found['closer']:.1%}</b> of {found['queries']:,} random samples are "
        f"nearer to a training image than {found['threshold']:.4g}; {found['percentile']:g}% of "
        f"{found['left_out']:,} training images are that near to another one, so "
        f"{found['percentile']:g}% is what new real images would show, up to {found['limit']:.1%} "
        "by chance.</p>"
        f"<p>Distance to the nearest, median: {found['median']:.4g} of samples, "
        f"{found['real_median']:.4g} of real images.</p>"
        f'<p class="soft">Euclidean, in the {escape(found["features"])}, among all '
        f"{found['count']:,} images of {escape(found['training'])}, not mirrored. A larger share "
        "means memorised images, or samples more typical than real ones, as strong guidance makes "
        "them: look at the pictures, a sample (its number and class) and the training images "
        "nearest to it (their distances). A small share does not rule out copied details.</p>"
        f"{_pairs('At random', found['random'], evaluation)}"
        f"{_pairs('The nearest of all looked at', found['closest'], evaluation)}"
        + _again(evaluation, [pair["sample"] for pair in found["random"] + found["closest"]])
    )


def _pairs(title: str, shown: Sequence[dict], evaluation: Evaluation) -> str:
    names, blocks = _names(evaluation.manifest), []
    for pair in shown:
        number = pair["sample"]
        name = f"{number}" + (f": {names[number]}" if number in names else "")
        sample = _tiles(evaluation.samples, [number], NEAR_SIDE, [name])
        near = _tiles(
            evaluation.training,
            pair["nearest"],
            NEAR_SIDE,
            [f"{distance:.3g}" for distance in pair["distances"]],
        )
        blocks.append(f'<div class="block pair near">{sample}{near}</div>')
    return f'<h3>{title}</h3><div class="blocks">{"".join(blocks)}</div>'


def _tiles(
    images: ImageSet, numbers: Sequence[int], side: int, captions: Sequence[str] = ()
) -> str:
    """Images of these indices in a wrapping row, with captions if given."""
    pictures = images.images(numbers)
    below = captions or [""] * len(pictures)
    figures = []
    for picture, number, text in zip(pictures, numbers, below, strict=True):
        image = tile(picture, side=side, alt=f"image {number} of {images.name}")
        caption = f'<figcaption title="{escape(text)}">{escape(text)}</figcaption>' if text else ""
        figures.append(f"<figure>{image}{caption}</figure>")
    return f'<div class="tiles">{"".join(figures)}</div>'


def _names(manifest: Manifest | None) -> dict[int, str]:
    """Number of each sample -> name of its class; {} where they are not known."""
    if manifest is None or len(manifest.class_names) < 2:
        return {}
    known = manifest.class_names
    return {number: _class(label, known) for number, label in enumerate(manifest.labels)}


def _class(label: int, names: Sequence[str]) -> str:
    return names[label] if label < len(names) else str(label)
