"""The pictures and the table of `evaluate/attention.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sit_vit5.evaluation.attention_maps import BRANCHES, BranchGate, PatchMap
from sit_vit5.files import replacing

# Inches: the side of a map, and the width that a letter of the title may take.
TILE, LETTER = 1.75, 0.09
# Branch -> colour, marker and its size: two lines at the same height both show.
STYLES = {"attention": ("tab:blue", "o", 9), "MLP": ("tab:orange", "s", 5)}


def draw_maps(
    path: Path,
    rows: Mapping[int, Mapping[str, PatchMap]],
    pictures: Mapping[str, np.ndarray],
    *,
    title: str,
    interpolation: str,
) -> None:
    """Saves a PNG: a row per block; the pictures, then one map per query."""
    # Imported here: matplotlib takes a second; Figure needs no display and no global state.
    from matplotlib.figure import Figure

    columns = len(pictures) + len(next(iter(rows.values())))
    needed = max(map(len, title.splitlines())) * LETTER
    size = (max(TILE * columns + 0.5, needed), (TILE + 0.42) * len(rows) + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for (number, maps), line in zip(rows.items(), axes, strict=True):
        line[0].set_ylabel(f"block {number}", fontsize=10)
        for axis, picture in zip(line, pictures.values(), strict=False):
            axis.imshow(np.broadcast_to(picture, (*picture.shape[:2], 3)))
        for axis, found in zip(line[len(pictures) :], maps.values(), strict=True):
            axis.imshow(
                found.weights.cpu().numpy(), vmin=0, interpolation=interpolation, cmap="viridis"
            )
            text = f"{found.share:.0%} on patches\nlargest {found.contrast:.1f}x mean"
            axis.set_xlabel(text, fontsize=8)
        for axis in line:
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
    for axis, name in zip(axes[0], [*pictures, *next(iter(rows.values()))], strict=True):
        axis.set_title(name, fontsize=10)
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=110)


def draw_gates(
    path: Path, gates: Sequence[Mapping[str, BranchGate]], *, title: str, fraction: float
) -> None:
    """Saves a PNG: the share of suppressed channels by block, a line per branch; a band shows its
    range over the conditions."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    numbers = range(len(gates))
    for branch, (color, marker, markersize) in STYLES.items():
        shares = [block[branch].shares.cpu() for block in gates]
        means = [share.mean().item() for share in shares]
        axis.plot(
            numbers,
            means,
            color=color,
            marker=marker,
            markersize=markersize,
            label=branch,
            clip_on=False,  # a line at 0 would be cut in half
        )
        if max(map(len, shares)) > 1:
            low, high = ([pick(share).item() for share in shares] for pick in (min, max))
            axis.fill_between(numbers, low, high, color=color, alpha=0.15, linewidth=0)
    axis.set(xlabel="block", ylabel=f"channels with |scale| at most {fraction:g} of the mean")
    axis.set_ylim(0, max(0.05, 1.1 * axis.get_ylim()[1]))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.yaxis.set_major_formatter(PercentFormatter(1))
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(title="branch", frameon=False)
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=110)


def gates_table(gates: Sequence[Mapping[str, BranchGate]], *, fraction: float) -> str:
    """Suppressed shares (mean, range over the conditions) and mean |scale|, a line per block."""
    head = "".join(f"{name:>24}{'mean |scale|':>14}" for name in BRANCHES)
    lines = [f"channels with |scale| at most {fraction:g} of the branch's mean", f"block{head}"]
    for number, block in enumerate(gates):
        line = f"{number:>5}"
        for branch in BRANCHES:
            shares = block[branch].shares
            low, high = shares.min().item(), shares.max().item()
            spread = f" ({low:.1%} to {high:.1%})" if len(shares) > 1 else ""
            line += f"{shares.mean().item():.1%}{spread}".rjust(24)
            line += f"{block[branch].mean_scale:>14.3g}"
        lines.append(line)
    return "\n".join(lines)
