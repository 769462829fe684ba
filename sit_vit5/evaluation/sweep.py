"""Sweep of guidance: table, CSV and figure, each with its number of samples."""

from __future__ import annotations

import csv
import io
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import groupby
from pathlib import Path

from sit_vit5.config import GenerateConfig, GuidanceConfig, MetricsConfig, SweepConfig, interval_of
from sit_vit5.config.parse import to_dict
from sit_vit5.evaluation.compare import Reference, open_reference
from sit_vit5.evaluation.evaluate import evaluate
from sit_vit5.evaluation.per_class import check_agreement
from sit_vit5.evaluation.report import json_path, metric_name
from sit_vit5.metrics.image_sets import UnmadeSet
from sit_vit5.models.checkpoint import Checkpoint, open_checkpoint
from sit_vit5.sampling.generate import complete_set, image_shape
from sit_vit5.sampling.load import LoadedModel, load
from sit_vit5.utils.distributed import Processes
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import check_same, lock, read_json, replacing, write_json, write_text
from sit_vit5.utils.progress import progress_bar
from sit_vit5.utils.run_folder import ARCHIVE, MANIFEST, SAMPLES, run_of, step_name

# Lines in the figure: colours by weights, line styles and markers by interval.
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
MOST_TICKS = 10
LINES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (5, 1, 1, 1, 1, 1)), "v"))


@dataclass(frozen=True)
class Cell:
    """One combination. interval: (low, high), None where scale 1 makes it irrelevant."""

    weights: str
    scale: float
    interval: tuple[float, float] | None

    @property
    def interval_text(self) -> str:
        """`0.3,1`, or - for none."""
        return "-" if self.interval is None else "{:g},{:g}".format(*self.interval)

    @property
    def folder(self) -> str:
        """Name of the cell's folder."""
        interval = "" if self.interval is None else "_interval_{:g}_{:g}".format(*self.interval)
        return f"{self.weights}_scale_{self.scale:g}{interval}"


@dataclass(frozen=True)
class Result:
    """Metrics of a cell and cost of one of its images. agreement: share; None: not requested."""

    cell: Cell
    distance: float
    agreement: float | None
    evaluations: int
    passes: int


@dataclass(frozen=True)
class Labels:
    """Names that carry the number of samples. reference: what the distance is to."""

    count: int
    features: str
    reference: str

    @property
    def distance(self) -> str:
        return metric_name(self.features, self.count)

    @property
    def agreement(self) -> str:
        return f"classified as asked-{self.count}"

    @property
    def warning(self) -> str:
        return (
            f"N = {self.count} per cell: distances of so few samples are biased upwards; use them "
            "to rank cells of this sweep, not as results"
        )


def best_of(results: Sequence[Result]) -> Result:
    """The cell of the smallest distance."""
    return min(results, key=lambda result: result.distance)


def columns(result: Result, labels: Labels) -> dict[str, object]:
    """A row of the CSV and JSON by column."""
    cell = result.cell
    low, high = cell.interval or (None, None)
    agreement = f"agreement_{labels.count}"
    row = {
        "weights": cell.weights,
        "guidance_scale": cell.scale,
        "interval_low": low,
        "interval_high": high,
        "num_samples": labels.count,
        f"frechet_distance_{labels.features}_{labels.count}": result.distance,
        agreement: result.agreement,
        "evaluations_per_image": result.evaluations,
        "network_passes_per_image": result.passes,
        "folder": cell.folder,
    }
    if result.agreement is None:
        del row[agreement]
    return row


def csv_text(rows: Sequence[dict[str, object]]) -> str:
    """The rows as CSV; an empty field where a value is None."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def table(results: Sequence[Result], labels: Labels) -> str:
    """A line per cell; the best one is marked."""
    asked = results[0].agreement is not None
    lines = [["weights", "scale", "interval", labels.distance]]
    lines[0] += [labels.agreement] * asked + ["passes per image", ""]
    for result in results:
        cell = result.cell
        line = [cell.weights, f"{cell.scale:g}", cell.interval_text, f"{result.distance:.4f}"]
        line += [f"{result.agreement:.1%}"] if asked else []
        lines.append([*line, str(result.passes), "best" * (result is best_of(results))])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:-1], widths[1:-1]), line[-1]])
        for line in lines
    ]
    return "\n".join(map(str.rstrip, text))


def draw(path: Path, results: Sequence[Result], labels: Labels, *, title: str) -> None:
    """Save a PNG: each metric against the scale, a line per weights and interval."""
    # Imported here: matplotlib takes a second; Figure needs no display and no global state.
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    asked = results[0].agreement is not None
    figure = Figure(figsize=(11.5 if asked else 7.5, 4.4), layout="constrained")
    figure.suptitle(f"{title}\n{labels.warning}", fontsize=9)
    axes = figure.subplots(1, 1 + asked, squeeze=False)[0]
    for axis, metric, label in zip(
        axes,
        ("distance", "agreement"),
        (f"{labels.distance}\nto {labels.reference} (lower is better)", labels.agreement),
        strict=False,
    ):
        _lines(axis, results, metric)
        axis.set(xlabel="guidance scale (1: off)", ylabel=label)
        scales = sorted({result.cell.scale for result in results})
        if len(scales) <= MOST_TICKS:
            axis.set_xticks(scales, [f"{scale:g}" for scale in scales])
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    if asked:
        axes[1].yaxis.set_major_formatter(PercentFormatter(1))
    handles, names = axes[0].get_legend_handles_labels()
    columns = len({result.cell.weights for result in results})  # one per weights
    figure.legend(
        handles, names, loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )
    best = best_of(results)
    (star,) = axes[0].plot(
        best.cell.scale, best.distance, "*", markersize=16, markerfacecolor="gold",
        markeredgecolor="black", linestyle="none", label=f"best: {best.distance:.4f}", zorder=3,
    )  # fmt: skip
    axes[0].legend(handles=[star], frameon=False, fontsize=9)
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=110)


def _lines(axis, results: Sequence[Result], metric: str) -> None:
    """One line per weights and interval; the point at scale 1 belongs to all of its weights."""
    weights = list(dict.fromkeys(result.cell.weights for result in results))
    intervals = list(dict.fromkeys(r.cell.interval for r in results if r.cell.interval))
    for number, name in enumerate(weights):
        above = len(weights) - 1 - number  # lines drawn over this one: where they agree, all show
        for place, interval in enumerate(intervals or [None]):
            mine = [
                (result.cell.scale, getattr(result, metric))
                for result in results
                if result.cell.weights == name and result.cell.interval in (None, interval)
            ]
            style, marker = LINES[place % len(LINES)]
            shown = "" if interval is None else ", interval {:g} to {:g}".format(*interval)
            axis.plot(
                *zip(*sorted(mine), strict=True), color=COLORS[number % len(COLORS)],
                linestyle=style, linewidth=1.2 + 1.3 * above, marker=marker,
                markersize=4 + 2 * above, label=name + shown,
            )  # fmt: skip


CELLS = "cells"
# Options that may differ between two calls in one folder: axes, paths, and those of speed only.
_FREE = (
    "checkpoint", "weights", "scales", "intervals", "agreement", "batch_size", "codec_path",
    "inception_weights", "out",
)  # fmt: skip


@dataclass(frozen=True)
class SweepFile:
    """Part of sweep.json that decides if a sweep can continue."""

    settings: dict


@dataclass(frozen=True)
class CellManifest:
    """Fields that a sweep reads from the manifest of a cell's samples."""

    samples_sha256: str
    evaluations_per_image: int
    network_passes_per_image: int


@dataclass(frozen=True)
class CellAgreement:
    """samples: the share of samples that a classifier assigns to their label."""

    samples: float


@dataclass(frozen=True)
class CellMetrics:
    """Fields that a sweep reads from the metrics of a cell."""

    samples_sha256: str
    extractor: dict
    frechet_distance: float
    reference_sha256: str | None = None
    agreement: CellAgreement | None = None


def sweep(options: SweepConfig, processes: Processes) -> None:
    """Fill every cell, write sweep.json, sweep.csv and sweep.png, and print their content."""
    checkpoint = open_checkpoint(options.checkpoint)
    step = step_name(checkpoint.state.step)
    run = run_of(checkpoint.folder)
    folder = Path(options.out or run / SAMPLES / f"sweep_{step}_{options.num_samples}")
    with lock(folder, "sweep") if processes.is_main else nullcontext():
        results = run_cells(folder, options, checkpoint, processes)
        if processes.is_main:
            labels = Labels(options.num_samples, options.features, options.reference)
            config = checkpoint.config
            title = f"{config.name or config.model}, step {checkpoint.state.step}"
            _report(folder, options, results, labels, title=title)


def sweep_cells(options: SweepConfig, checkpoint: Checkpoint) -> list[Cell]:
    """All combinations; scale 1 once for each weights."""
    averages = [name for name in checkpoint.weights_files() if name != "raw"]
    weights = [checkpoint.weights_name(name) for name in options.weights or averages]
    intervals = [interval_of(text) for text in options.intervals]
    cells = [
        Cell(name, scale, None if scale == 1 else interval)
        for name in weights
        for scale in options.scales
        for interval in intervals
    ]
    return list(dict.fromkeys(cells))


def cell_options(options: SweepConfig, cell: Cell) -> GenerateConfig:
    """The options by which sample/generate.py makes the cell's samples."""
    shared = {field.name: getattr(options, field.name) for field in fields(GenerateConfig)}
    guidance = GuidanceConfig(scale=cell.scale)  # scale 1: nothing else has an effect
    if cell.interval is not None:
        guidance = replace(options.guidance, scale=cell.scale, interval=cell.interval)
    return GenerateConfig(**shared | {"weights": cell.weights, "guidance": guidance, "out": None})


def command_flags(config: object, prefix: str = "--") -> list[str]:
    """Command-line flags of this configuration, for options that differ from their defaults."""
    flags = []
    for field in fields(config):
        name, value = prefix + field.name.replace("_", "-"), getattr(config, field.name)
        if is_dataclass(value):
            flags += command_flags(value, f"{name}.")
        elif value != field.default:
            flags += [name, *map(str, value if isinstance(value, tuple) else [value])]
    return flags


def run_cells(
    folder: Path, options: SweepConfig, checkpoint: Checkpoint, processes: Processes
) -> list[Result]:
    """Return the results of all cells, new or from earlier runs; empty off the main process."""
    cells = sweep_cells(options, checkpoint)
    reference, results = None, []
    with progress_bar(
        len(cells) * options.num_samples, unit="image", shown=processes.is_main
    ) as bar:
        for _, group in groupby(cells, key=lambda cell: cell.weights):
            group = list(group)
            loaded = _load(options, group, processes)
            if processes.is_main and reference is None:
                reference = _begin(folder, options, loaded)
            for cell in group:
                bar.set_description(f"{cell.weights}, {cell.scale:g}, {cell.interval_text}")
                chosen = cell_options(options, cell)
                place = folder / CELLS / cell.folder
                complete_set(place, chosen, loaded.under(chosen), processes, bar=bar)
                if processes.is_main:
                    results.append(_measure(place, cell, options, reference))
    return results


def _load(options: SweepConfig, cells: Sequence[Cell], processes: Processes) -> LoadedModel:
    """The network of these cells, with the weaker one of autoguidance if any of them needs it."""
    guided = next((cell for cell in cells if cell.scale != 1), cells[0])
    loaded = load(cell_options(options, guided), processes.device)
    for cell in cells:
        loaded.under(cell_options(options, cell))  # refuses a wrong interval before hours of work
    return loaded


def _begin(folder: Path, options: SweepConfig, loaded: LoadedModel) -> Reference:
    """Open the reference; check the options against it and against the folder's earlier cells."""
    shape = image_shape(loaded)
    blank = UnmadeSet("the model's images", shape)
    if options.agreement:
        check_agreement(options.agreement, blank, loaded.class_names)
    option = "--inception-weights"
    reference = open_reference(_metrics_options(options, Path()), blank, weights_option=option)
    sampler = to_dict(loaded.generator.settings)
    del sampler["guidance"]
    settings = {
        **{key: value for key, value in to_dict(options).items() if key not in _FREE},
        **sampler,
        "model": loaded.checkpoint.config.model,
        "step": loaded.checkpoint.state.step,
        "reference_sha256": reference.sha256,
        "extractor": reference.extractor.identity,
    }
    settings = json.loads(json.dumps(settings))
    path = folder / "sweep.json"
    if path.is_file():
        before = read_json(path, SweepFile, remedy="it is not a sweep's; choose another --out")
        check_same(folder, before.settings, settings, what="a sweep")
    write_json(path, {"complete": False, "settings": settings})
    return reference


def _metrics_options(options: SweepConfig, place: Path) -> MetricsConfig:
    return MetricsConfig(
        str(place / ARCHIVE),
        options.reference,
        metrics=("fid",),
        features=options.features,
        agreement=options.agreement,
        weights=options.inception_weights,
        batch_size=options.batch_size,
        keep_features=False,
    )


def _measure(place: Path, cell: Cell, options: SweepConfig, reference: Reference) -> Result:
    """Metrics of a complete cell, from its metrics.json if that is of the same samples."""
    asked = _metrics_options(options, place)
    path = json_path(asked)
    manifest = read_json(
        place / MANIFEST, CellManifest, remedy=f"remove {place} and run the same command again"
    )
    found = _cell_metrics(path)
    wanted = (manifest.samples_sha256, reference.sha256, reference.extractor.identity)
    if (
        found is None
        or (found.samples_sha256, found.reference_sha256, found.extractor) != wanted
        or (options.agreement and found.agreement is None)
    ):
        write_json(path, evaluate(asked, reference=reference))
        found = read_json(path, CellMetrics)
    return Result(
        cell,
        distance=found.frechet_distance,
        agreement=found.agreement.samples if options.agreement else None,
        evaluations=manifest.evaluations_per_image,
        passes=manifest.network_passes_per_image,
    )


def _cell_metrics(path: Path) -> CellMetrics | None:
    """Metrics of an earlier run; None if the file is absent or damaged."""
    try:
        return read_json(path, CellMetrics)
    except UserError:
        return None


def _report(
    folder: Path, options: SweepConfig, results: list[Result], labels: Labels, *, title: str
) -> None:
    rows = [columns(result, labels) for result in results]
    best = best_of(results)
    unguided = [result for result in results if result.cell.scale == 1]
    command = ["python", "sample/generate.py", *command_flags(cell_options(options, best.cell))]
    path = folder / "sweep.json"
    begun = read_json(path)
    found = {
        "best": columns(best, labels),
        "best_unguided": columns(best_of(unguided), labels) if unguided else None,
        "best_command": shlex.join(command),
        "note": labels.warning,
        "command": shlex.join(sys.argv),
    }
    write_json(path, begun | {"complete": True} | found | {"rows": rows})
    write_text(folder / "sweep.csv", csv_text(rows))
    draw(folder / "sweep.png", results, labels, title=title)
    print(table(results, labels))
    print(f"note: {labels.warning}")
    if unguided:
        plain = best_of(unguided)
        print(f"{labels.distance}, best unguided: {plain.distance:.4f}, {plain.cell.weights}")
    print(f"{labels.distance}, best: {best.distance:.4f}, made by\n  {shlex.join(command)}")
    print(*(folder / f"sweep.{kind}" for kind in ("json", "csv", "png")), sep="\n")
