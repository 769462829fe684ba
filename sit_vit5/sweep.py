"""Guidance scale x guidance interval x average of the weights, on a few samples of each.

Best values move with training, model and interval (rows T23, S6, S8), so every number needs its own
sweep. All cells start from the same noise and labels: differences between cells are those of the
settings. Each cell keeps its sample set and its metrics.json, so a killed sweep goes on.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import groupby
from pathlib import Path

from sit_vit5.checkpoint import Checkpoint, open_checkpoint
from sit_vit5.cli import to_dict
from sit_vit5.config import GenerateConfig, GuidanceConfig, MetricsConfig, SweepConfig, interval_of
from sit_vit5.distributed import Processes
from sit_vit5.errors import UserError
from sit_vit5.evaluation.agreement import check_agreement
from sit_vit5.evaluation.evaluate import evaluate
from sit_vit5.evaluation.reference import Reference, open_reference
from sit_vit5.evaluation.report import json_path
from sit_vit5.evaluation.sweep_report import (
    Cell,
    Labels,
    Result,
    best_of,
    columns,
    csv_text,
    draw,
    table,
)
from sit_vit5.files import check_same, lock, read_json, write_json, write_text
from sit_vit5.metrics.image_sets import UnmadeSet
from sit_vit5.progress import progress_bar
from sit_vit5.run_folder import ARCHIVE, MANIFEST, SAMPLES, run_of, step_name
from sit_vit5.sampling.generate import complete_set, image_shape
from sit_vit5.sampling.load import Loaded, load

CELLS = "cells"
# Options that may differ between two calls in one folder: axes, places, and what only costs time.
_FREE = (
    "checkpoint", "weights", "scales", "intervals", "agreement", "batch_size", "codec_path",
    "inception_weights", "out",
)  # fmt: skip


@dataclass(frozen=True)
class SweepFile:
    """What of sweep.json decides whether a sweep can be continued."""

    settings: dict


@dataclass(frozen=True)
class CellManifest:
    """What a sweep reads in the manifest of a cell's samples."""

    samples_sha256: str
    evaluations_per_image: int
    network_passes_per_image: int


@dataclass(frozen=True)
class CellAgreement:
    """samples: the share of samples that a classifier gives the asked class."""

    samples: float


@dataclass(frozen=True)
class CellMetrics:
    """What a sweep reads in the metrics of a cell."""

    samples_sha256: str
    extractor: dict
    frechet_distance: float
    reference_sha256: str | None = None
    agreement: CellAgreement | None = None


def sweep(options: SweepConfig, processes: Processes) -> None:
    """Fills every cell, writes sweep.json, sweep.csv and sweep.png, prints what they say."""
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
    """The flags by which a command gets this configuration: of all options that are not default."""
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
    """The results of all cells, made or found; none on other processes than the main one."""
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


def _load(options: SweepConfig, cells: Sequence[Cell], processes: Processes) -> Loaded:
    """The network of these cells, with the worse one of autoguidance if any of them needs it."""
    guided = next((cell for cell in cells if cell.scale != 1), cells[0])
    loaded = load(cell_options(options, guided), processes.device)
    for cell in cells:
        loaded.under(cell_options(options, cell))  # refuses a wrong interval before hours of work
    return loaded


def _begin(folder: Path, options: SweepConfig, loaded: Loaded) -> Reference:
    """Opens the reference, checks all against it and against what the folder holds already."""
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
    """The metrics of a complete cell, from its metrics.json if that is of the same samples."""
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
    """What an earlier run measured; None if its file is absent or damaged."""
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
