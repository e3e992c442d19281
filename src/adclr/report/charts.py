"""Curves as plain SVG: axes with round numbers, a band where the values are healthy, and nothing to load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from adclr.report.story import Points

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 60, 12, 12, 34
MOST_POINTS = 400  # of a line: more cannot be told apart
# The colours --c0 to --c5 of the style are Okabe and Ito's, which the colour-blind tell apart; dashes print in grey too
DASHES = ("", "7 3", "2 2", "9 3 2 3", "12 4", "4 4")


@dataclass(frozen=True)
class Line:
    name: str
    points: Points
    style: int = 0


@dataclass(frozen=True)
class Band:
    """Where a measure is healthy."""

    low: float
    high: float  # infinite where more is never bad

    def __str__(self) -> str:
        return f"above {number(self.low)}" if math.isinf(self.high) else f"{number(self.low)} to {number(self.high)}"


@dataclass(frozen=True)
class Level:
    """A value to compare a curve with."""

    value: float
    name: str


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most so many points: means of neighbours, of as many each (but for one), so that all are as noisy."""
    if len(points) <= most:
        return points
    ends = [len(points) * n // most for n in range(most + 1)]
    groups = [points[start:end] for start, end in pairwise(ends)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from about low to about high."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Short, for people."""
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


def chart(
    title: str,
    lines: Sequence[Line],
    meaning: str = "",
    band: Band | None = None,
    floor: float | None = None,
    level: Level | None = None,
) -> str:
    """A figure: its title, what it means, and the curves over epochs. `floor`: the axis begins there at the latest."""
    drawn = [(line, thinned(line.points)) for line in lines if line.points]
    if not drawn:
        return ""
    xs = [x for line, _ in drawn for x, _ in line.points]
    ys = [y for _, points in drawn for _, y in points]
    low, high = min(ys), max(ys)
    if floor is not None:
        low = min(low, floor)
    if band:  # so much of it that one sees where it is
        span = high - low
        low = min(low, max(band.low, low - span))
        high = high if math.isinf(band.high) else max(high, min(band.high, high + span))
    if level:
        low, high = min(low, level.value), max(high, level.value)
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5 * max(abs(low), 1e-3), high + 0.5 * max(abs(high), 1e-3)
    room = 0.04 * (high - low)
    low, high = low - (room if floor is None or low < floor else 0), high + room
    first, last = min(xs), max(xs)
    last = last if last > first else first + 1

    def x_of(x: float) -> float:
        return LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return HEIGHT - BOTTOM - (min(max(y, low), high) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    if band:
        top, bottom = y_of(band.high), y_of(band.low)
        parts.append(
            f'<rect class="band" x="{LEFT}" y="{top:.1f}" width="{WIDTH - LEFT - RIGHT}" '
            f'height="{max(0.0, bottom - top):.1f}"/>'
        )
    for tick in ticks(low, high):
        y = y_of(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in ticks(first, last, 6):
        parts.append(
            f'<text x="{x_of(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{number(tick)}</text>'
        )
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}" text-anchor="middle">epoch</text>')
    if level:
        y = y_of(level.value)
        parts.append(f'<path class="level" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{y + 14:.1f}" text-anchor="end">{escape(level.name)}</text>')
    for line, points in drawn:
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        values = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
        tag = f'data-name="{escape(line.name)}" data-values="{values}"'
        parts.append(f'<polyline {_stroke(line.style)} points="{path}" {tag}/>')
        if len(points) < 30:
            dot = f'<circle style="fill:var(--c{line.style % len(DASHES)})" r="2.5"'
            parts += [f'{dot} cx="{x_of(x):.1f}" cy="{y_of(y):.1f}"/>' for x, y in points]
    ends = "; ".join(f"{line.name} ends at {number(line.points[-1][1])}" for line, _ in drawn)
    healthy = f' <span class="healthy">healthy {band}</span>' if band else ""
    caption = (
        f'<figcaption><b>{escape(title)}</b> <span class="read"></span>{healthy}<br>{escape(meaning)}</figcaption>'
    )
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} over epochs: {escape(ends)}" '
        f'data-left="{LEFT}" data-right="{WIDTH - RIGHT}" data-first="{first:.6g}" data-last="{last:.6g}">'
    )
    return f'<figure class="chart">{caption}{svg}{"".join(parts)}<path class="cursor" d=""/></svg></figure>'


def _stroke(style: int) -> str:
    return f'style="stroke:var(--c{style % len(DASHES)})" stroke-dasharray="{DASHES[style % len(DASHES)]}"'


def legend(names: Sequence[str]) -> str:
    """Which line is whose."""
    keys = []
    for style, name in enumerate(names):
        line = f'<path d="M0 5H36" {_stroke(style)} stroke-width="2.5"/>'
        keys.append(f'<span><svg viewBox="0 0 36 10" width="36" height="10">{line}</svg> {escape(name)}</span>')
    return f'<p class="legend">{"".join(keys)}</p>'
