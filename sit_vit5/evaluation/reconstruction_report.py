"""The result of `evaluate/reconstruction.py` for people."""

from __future__ import annotations

import math

import numpy as np

UNITS = {"psnr": "dB, higher is better", "ssim": "higher is better", "lpips": "lower is better"}


def mean_of(values: np.ndarray) -> dict:
    """Mean over images and its standard error, of the finite ones; None without any."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return {"mean": None, "error": None}
    error = float(finite.std(ddof=1) / math.sqrt(len(finite))) if len(finite) > 1 else None
    return {"mean": float(finite.mean()), "error": error}


def report(result: dict) -> str:
    """The result as a table."""
    rows = [(result["name"], f"{result['frechet_distance']:.4f}", "against the originals")]
    for name, unit in UNITS.items():
        if name in result:
            mean, error = result[name]["mean"], result[name]["error"]
            value = "infinite" if mean is None else f"{mean:.4f}"
            rows.append((name.upper(), value, unit + (f", +- {error:.4f}" if error else "")))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]}" for row in rows]
    return "\n".join(lines + [f"note: {note}" for note in result["notes"]])
