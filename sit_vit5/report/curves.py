"""Curves over the steps as inline SVG: no script, no file beside the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, pairwise

MOST_POINTS = 1000
MOST_MEANS = 100
# Of the drawing, in its own units: whole, and the margins of the axes.
WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 60, 30, 12, 26

Point = tuple[int, float | None]  # step, value; None: a gap


@dataclass(frozen=True)
class Axis:
    """Places values between two ends of the drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Coordinate of a value."""
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values inside, about five."""
        if not self.log or self.high / self.low < 10:
            return _round_values(self.low, self.high)
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        every = max(1, math.ceil((last - first) / 5))
        parts = (1, 2, 5) if last - first < 2 else (1,)
        values = [
            part * 10.0**power for power in range(first - 1, last + 1, every) for part in parts
        ]
        return [value for value in values if self.low <= value <= self.high]


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points with the same outline: the lowest and highest of each stretch."""
    if len(points) <= most:
        return list(points)
    kept = []
    for stretch in _stretches(points, most // 2):
        known = [point for point in stretch if point[1] is not None]
        if known:
            ends = {min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])}
            kept += sorted(ends)
        else:
            kept.append(stretch[0])
    return kept


def means(points: Sequence[Point], most: int = MOST_MEANS) -> list[Point]:
    """At most `most` points: the last step of each stretch and the mean over it."""
    if len(points) <= most:
        return list(points)
    found: list[Point] = []
    for stretch in _stretches(points, most):
        known = [value for _, value in stretch if value is not None]
        found.append((stretch[-1][0], sum(known) / len(known) if known else None))
    return found


def curve(
    points: Sequence[Point],
    *,
    name: str,
    log: bool,
    marks: Sequence[int] = (),
    beside: Mapping[str, Sequence[Point]] | None = None,
) -> str:
    """An SVG of one curve, over a logarithmic axis or from 0.

    `marks` are steps with a vertical line, where the run was resumed; `beside` other curves by
    their names, drawn dashed.
    """
    values = [value for _, value in points if value is not None]
    if not values:
        return "<p>no value yet</p>"
    others = beside or {}
    everything = sorted([*points, *chain.from_iterable(others.values())], key=lambda p: p[0])
    values = [value for _, value in everything if value is not None]
    x_axis, y_axis = _axes(everything, values, log=log)
    averages = means(points)
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">',
            *_grid(x_axis, y_axis),
            *(_mark(x_axis, step) for step in marks if x_axis.low <= step <= x_axis.high),
            *chain.from_iterable(
                _beside(others[title], x_axis, y_axis, title, below=number == 0)
                for number, title in enumerate(sorted(others, key=lambda t: others[t][-1][1]))
            ),
            f'<path class="curve" d="{_path(thin(points), x_axis, y_axis)}"/>',
            f'<path class="mean" d="{_path(averages, x_axis, y_axis)}"/>',
            *_hovers(averages, x_axis, y_axis, name),
            *chain.from_iterable(
                _dots(other, x_axis, y_axis, title) for title, other in others.items()
            ),
            "</svg>",
        ]
    )


def shown(value: float) -> str:
    """A number with four figures, thousands in groups."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _stretches(points: Sequence[Point], count: int) -> list[Sequence[Point]]:
    edges = [round(i * len(points) / count) for i in range(count + 1)]
    return [points[low:high] for low, high in pairwise(edges)]


def _axes(points: Sequence[Point], values: Sequence[float], *, log: bool) -> tuple[Axis, Axis]:
    """Steps from left to right, values from bottom to top, neither of them empty."""
    first, last = points[0][0], points[-1][0]
    x_axis = Axis(first, max(last, first + 1), LEFT, WIDTH - RIGHT)
    low, high = min(values), max(values)
    if log and low > 0:
        return x_axis, Axis(low / 1.05, high * 1.05, HEIGHT - BOTTOM, TOP, log=True)
    low, high = min(low, 0), max(high, 0)
    return x_axis, Axis(low, high + 0.05 * (high - low or 1), HEIGHT - BOTTOM, TOP)


def _round_values(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(power * part for part in (1, 2, 5, 10) if power * part >= rough)
    count = range(math.ceil(low / width), math.floor(high / width) + 1)
    return [round(number * width, 12) for number in count]


def _grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    """Lines and numbers of both axes."""
    lines = []
    for value in y_axis.ticks():
        y = y_axis.place(value)
        lines.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        lines.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{shown(value)}</text>'
        )
    for value in x_axis.ticks():
        if value == int(value):
            x = x_axis.place(value)
            lines.append(f'<path class="grid" d="M{x:.1f} {HEIGHT - BOTTOM}v4"/>')
            lines.append(
                f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{int(value):,}</text>'
            )
    return lines


def _mark(x_axis: Axis, step: int) -> str:
    x = x_axis.place(step)
    return (
        f'<path class="mark" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}">'
        f"<title>resumed at step {step:,}</title></path>"
    )


def _beside(
    points: Sequence[Point], x_axis: Axis, y_axis: Axis, name: str, *, below: bool
) -> list[str]:
    """A dashed curve with its name below or above its last point."""
    x, y = x_axis.place(points[-1][0]), y_axis.place(points[-1][1]) + (15 if below else -5)
    return [
        f'<path class="beside" d="{_path(points, x_axis, y_axis)}"/>',
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="end">{escape(name)}</text>',
    ]


def _dots(points: Sequence[Point], x_axis: Axis, y_axis: Axis, name: str) -> list[str]:
    """A dot per point that shows step and value under the pointer."""
    return [
        f'<circle class="dot" cx="{x_axis.place(step):.1f}" cy="{y_axis.place(value):.1f}" r="3">'
        f"<title>step {step:,}: {escape(name)} {shown(value)}</title></circle>"
        for step, value in points
    ]


def _path(points: Sequence[Point], x_axis: Axis, y_axis: Axis) -> str:
    """The path data: a pen that is lifted over gaps and leaves a dot at a lone point."""
    parts, down = [], False
    for step, value in points:
        if value is not None:
            place = f"{x_axis.place(step):.1f} {y_axis.place(value):.1f}"
            parts.append(f"L{place}" if down else f"M{place}h0")
        down = value is not None
    return "".join(parts)


def _hovers(points: Sequence[Point], x_axis: Axis, y_axis: Axis, name: str) -> list[str]:
    """Columns over the whole height that show step and value under the pointer."""
    known = [point for point in points if point[1] is not None]
    width = (x_axis.end - x_axis.start) / max(len(known), 2)
    return [
        f'<g class="hover"><rect x="{x_axis.place(step) - width / 2:.1f}" y="{TOP}" '
        f'width="{width:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
        f'<circle cx="{x_axis.place(step):.1f}" cy="{y_axis.place(value):.1f}" r="4"/>'
        f"<title>step {step:,}: {escape(name)} {shown(value)}</title></g>"
        for step, value in known
    ]
