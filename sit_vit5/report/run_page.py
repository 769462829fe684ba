"""run.html: state, curves, grids, events and commands of a run, in one file."""

from __future__ import annotations

import io
import shlex
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from html import escape
from itertools import pairwise
from pathlib import Path
from string import Template
from urllib.parse import quote

import yaml
from PIL import Image

from sit_vit5.config import TrainConfig
from sit_vit5.config.parse import flatten, to_dict
from sit_vit5.config.presets import backbone
from sit_vit5.report.curves import Point, curve, shown
from sit_vit5.report.html import data_url, definitions, document
from sit_vit5.report.published import (
    IMAGE_SIZE,
    PUBLISHED_SAMPLES,
    SAMPLER_FLAGS,
    paper_name,
    published,
    rival,
)
from sit_vit5.utils.files import write_text
from sit_vit5.utils.run_folder import PAGE_FILE, SAMPLES

_STYLE = """
.state { font-weight: 600; font-size: .85rem; padding: 1px 10px; border-radius: 99px;
  border: 1px solid; color: var(--accent); }
.state.finished { color: var(--good); }
.state.failed { color: var(--bad); }
.state.interrupted { color: var(--warn); }
progress { display: block; width: 100%; height: 8px; margin: 14px 0; accent-color: var(--accent); }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr));
  gap: 14px; }
.grids { display: flex; flex-wrap: wrap; gap: 18px; }
.grids figure { max-width: min(100%, 520px); }
.curves figure { background: var(--card); border-radius: 8px; padding: 10px 10px 4px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; }
@media (max-width: 600px) { svg text { font-size: 17px; } }
.grid { stroke: var(--rule); fill: none; }
.curve, .mean { stroke: var(--accent); stroke-linejoin: round; stroke-linecap: round; fill: none; }
.curve { stroke-width: 1; opacity: .35; }
.mean { stroke-width: 2; }
.mark { stroke: var(--warn); stroke-width: 1.5; stroke-dasharray: 4 4; fill: none; }
.beside { stroke: var(--good); stroke-width: 1.5; stroke-dasharray: 6 4; fill: none; }
.dot { fill: var(--good); }
.hover rect { fill: transparent; }
.hover circle { fill: none; }
.hover:hover circle { fill: var(--accent); }
.events td:nth-child(-n+3) { white-space: nowrap; font-variant-numeric: tabular-nums; }
.events td:nth-child(4) { min-width: 240px; }
.warning td:nth-child(3), .skipped td:nth-child(3), .interrupted td:nth-child(3) {
  color: var(--warn); }
.failed td:nth-child(3) { color: var(--bad); }
.started td:nth-child(3), .resumed td:nth-child(3) { color: var(--accent); }
.done td:nth-child(3) { color: var(--good); }
"""

# `$name` and the like are filled in, escaped already.
_BODY = """\
<header><h1>$name</h1><span class="state $state">$state</span><p>written $written</p></header>
<progress value="$progress" max="1"></progress>
<dl class="numbers">
$numbers
</dl>
<dl class="facts">
$facts
</dl>
<h2>Curves</h2>
<p class="soft">every row of metrics.jsonl, of long runs the span; the thick line is a mean over up
to a hundredth of the run; dashed: resumed</p>
<div class="curves">
$curves
</div>
<h2>Grids</h2>
$grids
<h2>Commands</h2>
<p class="soft">to continue, draw, sample and evaluate, from the folder the run was started in</p>
<pre>$commands</pre>
<h2>Events</h2>
<div class="scroll"><table class="events">
<tr><th>step</th><th>time</th><th>kind</th><th>what</th></tr>
$events
</table></div>
<h2>Configuration</h2>
<div class="scroll"><table>
<tr><th>option that differs</th><th>value</th><th>default</th></tr>
$changes
</table></div>
<details><summary>all of it</summary>
<pre>$config</pre>
</details>"""

PAGE = document(title="$name: $state", style=_STYLE, body=_BODY)


EMBEDDED = 4
# A larger file is embedded as a JPEG of at most this width.
MOST_BYTES, MOST_WIDTH = 300_000, 1000


def grids(run: Path) -> str:
    """Figures and links, newest first."""
    paths = sorted((run / SAMPLES).glob("step_*.png"), key=_step_of, reverse=True)
    if not paths:
        return "<p>none drawn yet</p>"
    figures = [
        f"<figure><figcaption>step {_step_of(path):,}</figcaption>"
        f'<a href="{_link(path)}"><img alt="samples at step {_step_of(path)}" '
        f'src="{_data(path, path.stat().st_mtime_ns)}"></a></figure>'
        for path in paths[:EMBEDDED]
    ]
    links = [f'<a href="{_link(path)}">{_step_of(path):,}</a>' for path in paths[EMBEDDED:]]
    older = f"<p>older, beside this file: step {', '.join(links)}</p>" if links else ""
    return '<div class="grids">' + "\n".join(figures) + f"</div>{older}"


def _step_of(path: Path) -> int:
    digits = path.stem.removeprefix("step_")
    return int(digits) if digits.isdigit() else 0


def _link(path: Path) -> str:
    return escape(quote(f"{SAMPLES}/{path.name}"))


@lru_cache(maxsize=2 * EMBEDDED)
def _data(path: Path, changed: int) -> str:
    """A data URL of a picture; `changed`: when the file was, so that it is read once."""
    content, kind = path.read_bytes(), "png"
    if len(content) > MOST_BYTES:
        with Image.open(io.BytesIO(content)) as image:
            small = image.convert("RGB")
        small.thumbnail((MOST_WIDTH, 4 * MOST_WIDTH), Image.Resampling.LANCZOS)
        stream, kind = io.BytesIO(), "jpeg"
        small.save(stream, format="jpeg", quality=85)
        content = stream.getvalue()
    return data_url(content, kind)


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
        f"{options.steps} steps: evaluate {PUBLISHED_SAMPLES:,} samples of a checkpoint by the SDE "
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
