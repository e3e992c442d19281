"""The figure of a study, as plain SVG: a panel for each score, a dot for each seed, a bar at their mean.

Where the study has a grid, its points are the axis and each arm is a line; else arms are the axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from adclr.report.charts import number, ticks
from adclr.study.outline import Outline, Study
from adclr.study.table import Rows, Sample

WIDTH, HEIGHT, ACROSS = 430, 280, 2  # pixels of a panel; panels side by side
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 40, 66  # BOTTOM has room for slanted names
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's
DASHED = 'stroke="#555" stroke-dasharray="5 4"'
LETTER = 6.4  # pixels of a letter, about


@dataclass(frozen=True)
class Series:
    name: str
    samples: Sequence[Sample]  # one for each place of the axis


def draw(study: Study, rows: Rows) -> str | None:
    """None if there is nothing to show."""
    panels = []
    arms, points = study.arms, study.points
    labels = {(cell.arm, cell.point): cell.label for cell in study.cells}
    shared = _shared(points)
    for title in study.outline.evaluations:
        control = rows[study.outline.control][title].mean if study.outline.control else None
        if len(points) > 1:
            series = [Series(arm, [rows[labels[arm, point]][title] for point in points]) for arm in arms]
            axis = [point.removeprefix(shared) for point in points]
        else:
            series = [Series("", [rows[labels[arm, points[0]]][title] for arm in arms])]
            axis = [arm or study.cells[0].label for arm in arms]
        if any(sample.by_seed for one in series for sample in one.samples):
            panels.append(_panel(title, axis, series, control, shared.rstrip("=")))
    if not panels:
        return None
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    names = [arm for arm in arms if arm] if len(points) > 1 else []
    size = f'width="{across * WIDTH}" height="{down * HEIGHT + 30}"'
    placed = [
        f'<g transform="translate({i % across * WIDTH} {i // across * HEIGHT + 30})">{panel}</g>'
        for i, panel in enumerate(panels)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {across * WIDTH} {down * HEIGHT + 30}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{_legend(names, study.outline)}{''.join(placed)}</svg>\n"
    )


def _shared(points: Sequence[str]) -> str:
    """'num_queries=', if all points are of that one setting."""
    firsts = {point.split("=")[0] + "=" for point in points if "=" in point}
    return firsts.pop() if len(firsts) == 1 and not any("," in point for point in points) else ""


def _legend(names: Sequence[str], outline: Outline) -> str:
    """The title, whose colour is whose, and the line of the control."""
    x = LEFT + 30 + LETTER * len(outline.title) * 1.15  # it is bold
    parts = [f'<text x="{LEFT}" y="20" font-weight="bold">{escape(outline.title)}</text>']
    for style, name in enumerate(names if len(names) > 1 else ()):
        parts.append(f'<circle cx="{x:.0f}" cy="16" r="4" fill="{COLOURS[style % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 8:.0f}" y="20">{escape(name)}</text>')
        x += 30 + LETTER * len(name)
    if outline.control:
        parts.append(
            f'<path d="M{x:.0f} 16h24" {DASHED}/><text x="{x + 30:.0f}" y="20">{escape(outline.control)}</text>'
        )
    return "".join(parts)


def _panel(title: str, axis: Sequence[str], series: Sequence[Series], control: float | None, below: str) -> str:
    values = [score for one in series for sample in one.samples for score in sample.by_seed.values()]
    values += [] if control is None else [control]
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or max(abs(high) * 0.05, 1e-3)
    low, high = low - room, high + room
    step = (WIDTH - LEFT - RIGHT) / len(axis)

    def y_of(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="{TOP - 12}">{escape(title)}</text>']
    for tick in ticks(low, high):
        y = y_of(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    if control is not None:
        parts.append(f'<path d="M{LEFT} {y_of(control):.1f}H{WIDTH - RIGHT}" {DASHED}/>')
    slanted = any(len(name) * LETTER > step - 6 for name in axis)
    for place, name in enumerate(axis):
        x, y = LEFT + (place + 0.5) * step, HEIGHT - BOTTOM + 16
        turned = f'transform="rotate(-25 {x:.1f} {y})" text-anchor="end"' if slanted else 'text-anchor="middle"'
        parts.append(f'<text x="{x:.1f}" y="{y}" {turned}>{escape(name)}</text>')
    if below:
        parts.append(
            f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - BOTTOM + 36}" text-anchor="middle" '
            f'fill="#444">{escape(below)}</text>'
        )
    for style, one in enumerate(series):
        colour = COLOURS[style % len(COLOURS)]
        shift = (style - (len(series) - 1) / 2) * min(14.0, step / (len(series) + 1))
        places = [LEFT + (place + 0.5) * step + shift for place in range(len(axis))]
        means = [(x, y_of(s.mean)) for x, s in zip(places, one.samples, strict=True) if s.mean is not None]
        if below:  # an axis of numbers; arms are not joined
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in means)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5" opacity="0.6"/>')
        for x, sample in zip(places, one.samples, strict=True):
            parts += [
                f'<circle cx="{x:.1f}" cy="{y_of(y):.1f}" r="3" fill="{colour}" opacity="0.55"/>'
                for y in sample.by_seed.values()
            ]
        parts += [f'<path d="M{x - 9:.1f} {y:.1f}h18" stroke="{colour}" stroke-width="3"/>' for x, y in means]
    parts.append(f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#444"/>')
    return "".join(parts)
