"""Report of a result: a table on the screen, JSON on disk."""

from __future__ import annotations

from pathlib import Path

from sit_vit5.config import MetricsConfig
from sit_vit5.evaluation.inputs import BUILT_IN, archive_of, manifest_path
from sit_vit5.evaluation.per_class import BEYOND
from sit_vit5.metrics.registry import METRICS
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import check_output, read_json

# Result -> the one that is its standard error; decimals, if not four.
SPREADS = {"kernel_distance": "kernel_distance_standard_error"}
DIGITS = {"kernel_distance": 6}
PAGE_HEAD = 4096  # bytes of a page that hold its title


def metric_name(features: str, count: int, key: str = "frechet_distance") -> str:
    """A result's name with the number of samples, on which its value depends.

    FID and similar names are for Inception features; other features use the plain words.
    """
    names = {key: name for metric in METRICS.values() for key, name in metric.names.items()}
    name = names[key]
    if features != "inception":
        name = f"{key.replace('_', ' ').capitalize()} of {features}"
    return f"{name}-{'50K' if count == 50_000 else count}"


Row = tuple[str, str, str]  # name with the number of samples, value, what it was compared with


def report(result: dict) -> str:
    """The result as a table, under its warnings and above its notes."""
    rows = table_rows(result)
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"warning: {warning}" for warning in result["warnings"]]
    lines += [f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]}".rstrip() for row in rows]
    sampler = ((result["manifest"] or {}).get("settings") or {}).get("sampler")
    if sampler:
        lines.append("sampler: " + ", ".join(spelled(sampler)))
    if errors := result.get("selftest"):
        lines.append(f"self-test passed: largest error {max(errors.values()):.1e}")
    return "\n".join(lines + [f"note: {note}" for note in result["notes"]])


def table_rows(result: dict) -> list[Row]:
    """Every value of a result."""
    first, *others = metric_rows(result)
    rows = [first, *_uncertainty_rows(result), *others]  # uncertainty is of fid, the first
    if floor := result.get("floor"):
        for name, value, against in metric_rows(result | floor):
            rows.append((f"floor ({floor['samples']}): {name}", value, against))
    if agreement := result.get("agreement"):
        for what, share in (
            ("samples classified as asked", agreement["samples"]),
            ("real held-out classified right", agreement["held_out"]),
        ):
            rows.append((what, f"{share:.1%}", agreement["classifier"]))
    return rows + _class_rows(result) + _neighbour_rows(result)


def metric_rows(result: dict) -> list[Row]:
    """One row per value; those without a reference do not name one."""
    rows = []
    for metric in METRICS.values():
        for key in (key for key in metric.names if key in result):
            name = metric_name(result["extractor"]["features"], result["count"], key)
            value = f"{result[key]:.{DIGITS.get(key, 4)}f}"
            spread = result.get(SPREADS.get(key, ""))
            if spread is not None:
                value += f" +- {spread:.{DIGITS[key]}f}"
            rows.append((name, value, result["reference"] if metric.reference else ""))
    return rows


def _uncertainty_rows(result: dict) -> list[Row]:
    found, rows = result.get("uncertainty", {}), []
    if interval := found.get("interval"):
        value = f"{interval['low']:.4f} to {interval['high']:.4f}"
        rows.append(("its 95% interval", value, f"{interval['resamples']} resamples"))
    if line := found.get("extrapolation"):
        counts = line["counts"]
        rows.append(
            ("at infinitely many samples", f"{line['value']:.4f}", f"from {counts[0]} and more")
        )
    return rows


def _class_rows(result: dict) -> list[Row]:
    found = result.get("classes", {})
    if "scores" not in found:
        return []
    said = f"{found['beyond_noise']} of {len(found['scores'])}"
    return [(f"classes beyond {BEYOND} x noise", said, found["reference"])]


def _neighbour_rows(result: dict) -> list[Row]:
    found = result.get("neighbours")
    if not found:
        return []
    name = f"samples nearer than {found['percentile']:g}% of real images"
    return [(name, f"{found['closer']:.1%}", found["training"])]


def spelled(settings: dict, prefix: str = "") -> list[str]:
    """`name value` of all settings that are set, those of groups as `guidance.scale 1.5`."""
    said = []
    for key, value in settings.items():
        if isinstance(value, dict):
            said += spelled(value, f"{prefix}{key}.")
        elif value is not None:
            said.append(f"{prefix}{key} {value}")
    return said


def json_path(options: MetricsConfig) -> Path:
    """Path of the JSON: as given; or metrics.json beside samples.npz and in a folder of images,
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
    folder = archive_of(options.samples).is_dir()
    if not folder and out.resolve() == manifest_path(options.samples).resolve():
        raise UserError(f"--out {out} is the samples' manifest; choose another name")
    return out


def check_results(*paths: Path | None) -> None:
    """Refuse, before the work, files that cannot be written, and to replace a JSON or a page that
    no evaluation wrote."""
    for path in filter(None, paths):
        check_output(path)
        if path.exists() and not _is_result(path):
            raise UserError(f"{path} exists and is no result of an evaluation; remove it or choose "
                            "another --out")  # fmt: skip


def _is_result(path: Path) -> bool:
    if path.suffix == ".html":
        with path.open("rb") as file:
            return b": evaluation</title>" in file.read(PAGE_HEAD)
    try:
        return read_json(path).keys() >= {"command", "versions"}
    except UserError:
        return False


def page_path(options: MetricsConfig, json: Path) -> Path | None:
    """Path of the page: as given; or report.html beside metrics.json, NAME.report.html beside
    NAME.metrics.json, NAME.html beside any other NAME.json. None: no page is requested."""
    if not options.report.write:
        return None
    if options.report.out:
        out = Path(options.report.out)
        if out.suffix != ".html":
            raise UserError(f"--report.out {out} must end in .html")
        return out
    stem = json.stem
    if stem == "metrics" or stem.endswith(".metrics"):
        stem = stem.removesuffix("metrics") + "report"
    return json.with_name(f"{stem}.html")
