"""Layout of line charts in pixels: axes with round ticks, curves, and the range of healthy values.

`chart.html.j2` writes a chart as SVG. Colors are --c0 to --c5 of `style.css`, Okabe and Ito's palette, which the
color-blind can tell apart; dashes tell curves apart in grayscale print.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from jinja2 import Environment, PackageLoader, StrictUndefined

from adclr.report.record import Points

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 60, 12, 12, 34
MAX_POINTS = 400  # per curve; more cannot be told apart
MAX_DOTS = 30  # curves with fewer points show each of them
DASHES = ("", "7 3", "2 2", "9 3 2 3", "12 4", "4 4")


def format_number(value: float) -> str:
    """Return a short text with up to four significant digits."""
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


# Templates of all packages: `report/page.html.j2`; values are escaped, and a name that is not defined is an error.
TEMPLATES = Environment(
    loader=PackageLoader("adclr", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters |= {"number": format_number, "pixel": "{:.1f}".format}


@dataclass(frozen=True)
class Line:
    """One curve of a chart; its style is a number that gives color and dashes."""

    name: str
    points: Points
    style: int = 0

    @property
    def color(self) -> str:
        """Return the color as CSS."""
        return f"var(--c{self.style % len(DASHES)})"

    @property
    def dashes(self) -> str:
        """Return the SVG dash pattern; empty for a solid line."""
        return DASHES[self.style % len(DASHES)]


@dataclass(frozen=True)
class Band:
    """Range of values in which a metric is healthy."""

    low: float
    high: float  # infinite where more is never bad

    def __str__(self) -> str:
        low, high = (format_number(float(f"{value:.2g}")) for value in (self.low, self.high))
        return f"above {low}" if math.isinf(self.high) else f"{low} to {high}"


@dataclass(frozen=True)
class Level:
    """A value to compare a curve with."""

    value: float
    name: str


@dataclass(frozen=True)
class Axis:
    """Linear map from values to pixels."""

    low: float
    high: float
    start: float  # pixel of `low`
    end: float  # pixel of `high`

    def at(self, value: float) -> float:
        """Return the pixel of a value; values beyond the axis are drawn at its ends."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Return about `count` round values on the axis."""
        rough = (self.high - self.low) / count
        if rough <= 0 or not math.isfinite(rough):
            return [self.low]
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(n * step, 12) for n in range(first, last + 1)]


@dataclass(frozen=True)
class Curve:
    """A line in pixels."""

    line: Line
    pixels: list[tuple[float, float]]
    values: Points  # (epoch, value) of each pixel

    @property
    def path(self) -> str:
        """Return the points of an SVG polyline."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.pixels)

    @property
    def data(self) -> str:
        """Return the values as `chart.js` reads them."""
        return " ".join(f"{epoch:.4g},{value:.4g}" for epoch, value in self.values)

    @property
    def dots(self) -> list[tuple[float, float]]:
        """Return the pixels that get a dot: all of a short curve, else none."""
        return self.pixels if len(self.pixels) < MAX_DOTS else []


@dataclass(frozen=True)
class Chart:
    """All that `chart.html.j2` draws: curves over epochs, with their axes."""

    title: str
    meaning: str
    band: Band | None
    level: Level | None
    x: Axis
    y: Axis
    curves: list[Curve]
    remedy: str = ""  # what to do about a bad value
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def description(self) -> str:
        """Return what a screen reader says."""
        ends = "; ".join(f"{c.line.name} ends at {format_number(c.line.points[-1][1])}" for c in self.curves)
        return f"{self.title} over epochs: {ends}"


def layout_chart(
    title: str,
    lines: Sequence[Line],
    meaning: str = "",
    band: Band | None = None,
    floor: float | None = None,
    level: Level | None = None,
    remedy: str = "",
) -> Chart | None:
    """Return a chart of the lines that have points, None if none has. The y axis starts at `floor` or below."""
    averaged = [(line, average_points(line.points)) for line in lines if line.points]
    if not averaged:
        return None
    epochs = [x for line, _ in averaged for x, _ in line.points]
    first, last = min(epochs), max(epochs)
    x = Axis(first, last if last > first else first + 1, LEFT, WIDTH - RIGHT)
    low, high = _value_range([value for _, points in averaged for _, value in points], band, floor, level)
    y = Axis(low, high, HEIGHT - BOTTOM, TOP)
    curves = [Curve(line, [(x.at(a), y.at(b)) for a, b in points], points) for line, points in averaged]
    return Chart(title, meaning, band, level, x, y, curves, remedy)


def average_points(points: Points, most: int = MAX_POINTS) -> Points:
    """Return at most `most` points: means of neighbors in groups of equal size (up to 1), so that all are as noisy."""
    if len(points) <= most:
        return points
    ends = [len(points) * n // most for n in range(most + 1)]
    groups = [points[start:end] for start, end in pairwise(ends)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _value_range(
    values: Sequence[float], band: Band | None, floor: float | None, level: Level | None
) -> tuple[float, float]:
    """Return the ends of the y axis: those of the values, of what they are compared with, and a margin."""
    low, high = min(values), max(values)
    if floor is not None:
        low = min(low, floor)
    if band:  # at most as much of it as the curves are high
        span = high - low
        low = min(low, max(band.low, low - span))
        high = high if math.isinf(band.high) else max(high, min(band.high, high + span))
    if level:
        low, high = min(low, level.value), max(high, level.value)
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5 * max(abs(low), 1e-3), high + 0.5 * max(abs(high), 1e-3)
    margin = 0.04 * (high - low)
    return low - (margin if floor is None or low < floor else 0), high + margin
