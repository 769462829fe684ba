"""What a sweep found: table, CSV and picture, each with the number of samples on it."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sit_vit5.evaluation.report import metric_name
from sit_vit5.files import replacing

# Of the lines in the picture: colours by weights, line styles and markers by interval.
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
    """What a cell scored and what one of its images cost. agreement: share, None: not asked for."""

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
    """Saves a PNG: each metric against the scale, a line per weights and interval."""
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
    columns = len({result.cell.weights for result in results})  # one for each
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
