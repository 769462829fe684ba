"""run.html: one file that shows a run, without a script, a network or another file."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from datetime import timedelta
from html import escape
from itertools import pairwise
from pathlib import Path
from string import Template

import yaml

from sit_vit5.cli import flatten, to_dict
from sit_vit5.config import TrainConfig
from sit_vit5.files import write_text
from sit_vit5.page import definitions
from sit_vit5.presets import backbone
from sit_vit5.published import IMAGE_SIZE, SAMPLER_FLAGS, SAMPLES, paper_name, published, rival
from sit_vit5.run_folder import PAGE_FILE
from sit_vit5.training.curves import Point, curve, shown
from sit_vit5.training.page_grids import grids
from sit_vit5.training.page_template import PAGE

# Key in metrics.jsonl, what it is, whether its axis is logarithmic.
CURVES = (
    ("loss", "loss, mean over the interval", True),
    ("grad_norm", "gradient norm before clipping", True),
    ("lr", "learning rate", False),
    ("images_per_second", "images per second, without saving and drawing", False),
)
STARTS = ("started", "resumed")
FACTS = ("model", "data", "batch", "precision")
MOST_EVENTS = 200


def write_page(
    run: Path,
    config: TrainConfig,
    rows: Sequence[dict],
    events: Sequence[dict],
    evaluations: Sequence[dict] = (),
) -> None:
    """Replaces run.html. rows: of metrics.jsonl; the others: of their files, oldest first."""
    name, state = escape(run.name), _state(config, rows, events)
    page = Template(PAGE).substitute(
        name=name,
        state=state,
        written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        progress=f"{_step(rows) / config.steps:.4f}",
        numbers=_numbers(config, rows, events, running=state == "running"),
        facts=_facts(events),
        curves=_curves(rows, events) + _evaluations(config, evaluations),
        grids=grids(run),
        events=_events(events),
        changes=_changes(config),
        config=_configuration(config),
        commands=_commands(run, config),
    )
    write_text(run / PAGE_FILE, page)


def _state(config: TrainConfig, rows: Sequence[dict], events: Sequence[dict]) -> str:
    """running, interrupted, failed or finished, as of the last event that tells."""
    if _step(rows) >= config.steps:
        return "finished"
    telling = [e["kind"] for e in events if e["kind"] in (*STARTS, "interrupted", "failed")]
    return telling[-1] if telling and telling[-1] not in STARTS else "running"


def _step(rows: Sequence[dict]) -> int:
    return rows[-1]["step"] if rows else 0


def _numbers(
    config: TrainConfig, rows: Sequence[dict], events: Sequence[dict], *, running: bool
) -> str:
    """The figures at the top, each with its name."""
    last = rows[-1] if rows else {}
    rate, images = last.get("images_per_second"), last.get("images", 0)
    left = (config.steps - _step(rows)) * config.batch_size
    outside = _outside_share(rows, events)
    numbers = {
        "step": f"{_step(rows):,} of {config.steps:,}",
        "left": str(timedelta(seconds=round(left / rate))) if rate and running else None,
        "images seen": f"{images:,}",
        "epochs": f"{last['epoch']:,.2f}" if "epoch" in last else None,
        "loss": shown(last["loss"]) if last.get("loss") is not None else None,
        "images/s": shown(rate) if rate else None,
        "time outside steps": f"{outside:.1%}" if outside is not None else None,
        "steps skipped": str(last["skipped_steps"]) if last.get("skipped_steps") else None,
    }
    return definitions({title: value for title, value in numbers.items() if value})


def _outside_share(rows: Sequence[dict], events: Sequence[dict]) -> float | None:
    """Share of this session's time that went into saving, drawing and logging, after its first row.

    images_per_second counts the time of the steps alone.
    """
    since = max((e["unix_time"] for e in events if e["kind"] in STARTS), default=0)
    timed = [
        row
        for row in rows
        if row.get("images_per_second") and row.get("unix_time", 0) >= since and "images" in row
    ]
    if len(timed) < 2 or timed[-1]["unix_time"] - timed[0]["unix_time"] < 1:
        return None
    in_steps = sum(
        (row["images"] - before["images"]) / row["images_per_second"]
        for before, row in pairwise(timed)
    )
    return max(0.0, 1 - in_steps / (timed[-1]["unix_time"] - timed[0]["unix_time"]))


def _facts(events: Sequence[dict]) -> str:
    """What the last session said of model, data, batch and precision."""
    facts = {event["kind"]: event["text"] for event in events if event["kind"] in FACTS}
    return definitions(facts)


def _curves(rows: Sequence[dict], events: Sequence[dict]) -> str:
    resumed = sorted({event["step"] for event in events if event["kind"] == "resumed"})
    figures = []
    for key, title, log in CURVES:
        points: list[Point] = [(row["step"], row.get(key)) for row in rows]
        drawing = curve(points, name=title.split(",")[0], log=log, marks=resumed)
        figures.append(f"<figure><figcaption>{title}</figcaption>{drawing}</figure>")
    return "\n".join(figures)


def _evaluations(config: TrainConfig, evaluations: Sequence[dict]) -> str:
    """A curve of each metric of samples, and what it was at last."""
    figures = []
    for name in dict.fromkeys(name for row in evaluations for name in row["values"]):
        points: list[Point] = [
            (row["step"], row["values"][name]) for row in evaluations if name in row["values"]
        ]
        caption = (
            f"{name} of samples of {evaluations[-1]['weights']}: {shown(points[-1][1])} at last"
        )
        beside = _published(config, name)
        if beside:
            caption += f". {_incomparable(config)}"
        drawing = curve(points, name=escape(name), log=False, beside=beside)
        figures.append(f"<figure><figcaption>{escape(caption)}</figcaption>{drawing}</figure>")
    return "\n" + "\n".join(figures)


def _published(config: TrainConfig, metric: str) -> dict[str, list[Point]]:
    """Published FID by step of the run's model and its rival; {} for other metrics or data."""
    options, curves = config.evaluation, published().curves
    imagenet = "imagenet" in Path(options.reference or "").name.lower()
    if (
        config.model not in curves
        or not metric.startswith("FID-")
        or not imagenet
        or config.data.image_size != IMAGE_SIZE
        or options.guidance_scale != 1
    ):
        return {}
    models = filter(None, (config.model, rival(config.model)))
    return {f"{paper_name(model)}, published": list(curves[model].items()) for model in models}


def _incomparable(config: TrainConfig) -> str:
    """Why the values of a run must not be compared with the published ones."""
    options = config.evaluation
    return (
        f"Dashed: FID-50K without guidance ({published().curve_source}). It cannot be compared "
        f"with this curve, of {options.num_samples:,} samples by {options.method} in "
        f"{options.steps} steps: evaluate {SAMPLES:,} samples of a checkpoint by the SDE "
        "(docs/reproduce.md)"
    )


def _events(events: Sequence[dict]) -> str:
    """Rows of a table, newest first."""
    told = [event for event in events if event["kind"] not in FACTS]
    rows = [
        f'<tr class="{escape(event["kind"].split()[0])}"><td>{event["step"]:,}</td>'
        f"<td>{_clock(event['unix_time'])}</td>"
        f"<td>{escape(event['kind'])}</td><td>{escape(event['text'])}</td></tr>"
        for event in reversed(told[-MOST_EVENTS:])
    ]
    if len(told) > MOST_EVENTS:
        rows.append(f'<tr><td colspan="4">{len(told) - MOST_EVENTS} older ones</td></tr>')
    return "\n".join(rows)


def _changes(config: TrainConfig) -> str:
    """Rows of a table: the options that differ from their defaults, those of the model's preset."""
    values, defaults = flatten(to_dict(config)), _defaults(config)
    return "\n".join(
        f"<tr><td>{key}</td><td>{escape(_yaml(value))}</td>"
        f"<td>{escape(_yaml(defaults[key]))}</td></tr>"
        for key, value in values.items()
        if value != defaults[key]
    )


def _configuration(config: TrainConfig) -> str:
    """The whole configuration as YAML; what differs from the defaults is marked."""
    defaults = _defaults(config)

    def lines(tree: dict, prefix: str, indent: str) -> list[str]:
        found = []
        for key, value in tree.items():
            if isinstance(value, dict):
                found += [f"{indent}{key}:", *lines(value, f"{prefix}{key}.", indent + "  ")]
            else:
                text = escape(f"{key}: {_yaml(value)}")
                same = value == defaults[prefix + key]
                found.append(indent + (text if same else f"<mark>{text}</mark>"))
        return found

    return "\n".join(lines(to_dict(config), "", ""))


def _defaults(config: TrainConfig) -> dict:
    return flatten(to_dict(TrainConfig(backbone=backbone(config.model))))


def _yaml(value: object) -> str:
    """A value on one line, as the configuration file writes it."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("...\n").strip()


def _commands(run: Path, config: TrainConfig) -> str:
    """How to go on, from the folder in which the run was started."""
    has_curve = config.model in published().curves and config.data.image_size == IMAGE_SIZE
    sampler = f" {SAMPLER_FLAGS}" if has_curve else ""
    place, samples = shlex.quote(str(run)), shlex.quote(str(run / "samples/50k"))
    commands = [
        f"python train_sit.py --resume {place}",
        f"python sample/grid.py --checkpoint {place}",
        f"python sample/generate.py --checkpoint {place} --num-samples 50000 --out {samples}"
        + sampler,
        f"python evaluate/metrics.py {samples}/samples.npz --reference REFERENCE.npz",
    ]
    return "\n".join(escape(command) for command in commands)


def _clock(unix_time: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_time))
