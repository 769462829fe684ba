"""The sections of report.html that show images: the grid, classes, nearest training images."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape

import numpy as np

from sit_vit5 import rng
from sit_vit5.evaluation.classes import BEYOND
from sit_vit5.evaluation.evaluate import Evaluation
from sit_vit5.evaluation.inputs import Manifest
from sit_vit5.evaluation.real_sets import samples_numbers
from sit_vit5.metrics.image_sets import ImageSet
from sit_vit5.page import row, table, tile

# Sides in CSS pixels: of the grid, of neighbours, of classes.
SIDE, NEAR_SIDE, CLASS_SIDE = 112, 80, 64
# Classes shown at either end, and images of each side of one.
ENDS, OF_EACH = 4, 6


def grid(evaluation: Evaluation, count: int, seed: int) -> str:
    """Random samples, each with the name of the class that it was asked to show."""
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
    """What keeps the two sides' classes from being the same ones."""
    matching = evaluation.classes.matching
    remarks = [f"<b>{escape(matching.warning)}</b>"] if matching.warning else []
    remarks += [escape(matching.note)] if matching.note else []
    return "".join(f"<p>{remark}</p>" for remark in remarks)


def _ends(title: str, places: np.ndarray, evaluation: Evaluation, names: Sequence[str]) -> str:
    """Blocks of the classes at these places of the columns."""
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
    """The command in a manifest, for the samples of these numbers alone; "" if it is another's."""
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
    """What the distances say of copies, then samples beside their nearest training images."""
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
    """Images of these numbers in a row that breaks, with captions if there are any."""
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
