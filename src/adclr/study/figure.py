"""The figure of a study, as plain SVG: a panel for each score, a dot for each seed, a bar at their mean.

Where the study has a grid, its points are the axis and each arm is a line; else arms are the axis. Names that have no
room side by side stand one above the other, with the scores to their right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from adclr.report.charts import number, ticks
from adclr.study.outline import Outline, Study
from adclr.study.table import Rows, Sample

WIDTH, HEIGHT, ACROSS = 430, 280, 2  # pixels of a panel; panels side by side
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 40, 66
LINE = 22  # pixels from one line of names to the next
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's
DASHED = 'stroke="#555" stroke-dasharray="5 4"'
LETTER = 6.8  # pixels of a letter, about


@dataclass(frozen=True)
class Series:
    name: str
    samples: Sequence[Sample]  # one for each place of the axis


@dataclass(frozen=True)
class Frame:
    """Where scores are drawn, in pixels of a panel; lying: names below one another, scores to the right."""

    left: float
    right: float
    top: float
    bottom: float
    lying: bool


@dataclass(frozen=True)
class Panel:
    drawn: str
    width: float
    height: float


def draw(study: Study, rows: Rows) -> str | None:
    """None if there is nothing to show. Arms of which nothing is known yet are left to the table."""
    panels = []
    labels = {(cell.arm, cell.point): cell.label for cell in study.cells}
    known = {label for label, samples in rows.items() if any(sample.by_seed for sample in samples.values())}
    points = study.points
    arms = [arm for arm in study.arms if any(labels[arm, point] in known for point in points)]
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
    across = min(ACROSS, len(panels)) if panels[0].width <= WIDTH else 1
    names = [arm for arm in arms if arm] if len(points) > 1 else []
    longest = max(
        1.15 * len(study.outline.title), 5 + max(map(len, [*names, study.outline.control or ""]))
    )  # it is bold
    width = max(across * panels[0].width, LEFT + LETTER * longest)
    legend, y = _legend(names, study.outline, width)
    placed = []
    for start in range(0, len(panels), across):
        row = panels[start : start + across]
        for place, panel in enumerate(row):
            placed.append(f'<g transform="translate({place * panel.width:.0f} {y:.0f})">{panel.drawn}</g>')
        y += max(panel.height for panel in row)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y:.0f}" '
        f'viewBox="0 0 {width:.0f} {y:.0f}" font-family="sans-serif" font-size="12">'
        '<rect width="100%" height="100%" fill="white"/>'
        f"{legend}{''.join(placed)}</svg>\n"
    )


def _shared(points: Sequence[str]) -> str:
    """'num_queries=', if all points are of that one setting."""
    firsts = {point.split("=")[0] + "=" for point in points if "=" in point}
    return firsts.pop() if len(firsts) == 1 and not any("," in point for point in points) else ""


def _legend(names: Sequence[str], outline: Outline, width: float) -> tuple[str, float]:
    """The title; below it whose colour is whose, and the line of the control; and where that ends."""
    parts = [f'<text x="{LEFT}" y="20" font-weight="bold">{escape(outline.title)}</text>']
    x, y = float(LEFT), 20.0 + LINE
    keys = [(name, f'<circle cx="8" cy="-4" r="4" fill="{colour}"/>', 18) for name, colour in _coloured(names)]
    if outline.control:
        keys.append((outline.control, f'<path d="M0 -4h24" {DASHED}/>', 30))
    for name, sign, room in keys:
        wide = room + LETTER * len(name)
        if x > LEFT and x + wide > width:
            x, y = float(LEFT), y + LINE
        parts.append(f'<g transform="translate({x:.0f} {y:.0f})">{sign}<text x="{room}">{escape(name)}</text></g>')
        x += wide + 20
    return "".join(parts), y if keys else y - LINE


def _coloured(names: Sequence[str]) -> list[tuple[str, str]]:
    shown = names if len(names) > 1 else ()
    return [(name, COLOURS[place % len(COLOURS)]) for place, name in enumerate(shown)]


def _panel(title: str, axis: Sequence[str], series: Sequence[Series], control: float | None, below: str) -> Panel:
    step = (WIDTH - LEFT - RIGHT) / len(axis)
    longest = LETTER * max(len(name) for name in axis)
    if longest > step - 6:
        step = max(LINE, 12.0 * len(series))
        frame = Frame(longest + 20, longest + 20 + WIDTH - LEFT - RIGHT, TOP, TOP + step * len(axis), lying=True)
    else:
        frame = Frame(LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM, lying=False)
    values = [score for one in series for sample in one.samples for score in sample.by_seed.values()]
    values += [] if control is None else [control]
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or max(abs(high) * 0.05, 1e-3)
    low, high = low - room, high + room

    def at(place: float, score: float) -> tuple[float, float]:
        """A pixel: of a place along the names, in steps, and a score."""
        share = (score - low) / (high - low)
        if frame.lying:
            return frame.left + share * (frame.right - frame.left), frame.top + place * step
        return frame.left + place * step, frame.bottom - share * (frame.bottom - frame.top)

    def across(score: float, style: str) -> str:
        (x, y), (to_x, to_y) = at(0, score), at(len(axis), score)
        return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" {style}/>'

    parts = [f'<text x="{frame.left:.0f}" y="{TOP - 12}">{escape(title)}</text>']
    for tick in ticks(low, high):
        x, y = at(0, tick)
        anchor, x, y = ("middle", x, frame.bottom + 16) if frame.lying else ("end", x - 6, y + 4)
        parts.append(across(tick, 'stroke="#ddd"'))
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{number(tick)}</text>')
    if control is not None:
        parts.append(across(control, DASHED))
    for row, name in enumerate(axis):
        x, y = at(row + 0.5, low)
        anchor, x, y = ("end", x - 8, y + 4) if frame.lying else ("middle", x, y + 16)
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(name)}</text>')
    if below:
        x, y = (frame.left + frame.right) / 2, frame.bottom + 36
        anchor, x, y = ("end", frame.left - 8, TOP - 12.0) if frame.lying else ("middle", x, y)
        parts.append(f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="#444">{escape(below)}</text>')
    for style, one in enumerate(series):
        colour = COLOURS[style % len(COLOURS)]
        shift = (style - (len(series) - 1) / 2) * min(14.0, step / (len(series) + 1)) / step
        places = [place + 0.5 + shift for place in range(len(axis))]
        means = [at(place, s.mean) for place, s in zip(places, one.samples, strict=True) if s.mean is not None]
        if below:  # an axis of numbers; arms are not joined
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in means)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5" opacity="0.6"/>')
        for place, sample in zip(places, one.samples, strict=True):
            dots = [at(place, score) for score in sample.by_seed.values()]
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" opacity="0.55"/>' for x, y in dots]
        bar = f'stroke="{colour}" stroke-width="3"'
        for x, y in means:
            line = f"M{x:.1f} {y - 6:.1f}v12" if frame.lying else f"M{x - 9:.1f} {y:.1f}h18"
            parts.append(f'<path d="{line}" {bar}/>')
    sides = f"M{frame.left:.1f} {frame.top:.1f}V{frame.bottom:.1f}H{frame.right:.1f}"
    parts.append(f'<path d="{sides}" fill="none" stroke="#444"/>')
    return Panel("".join(parts), frame.right + RIGHT, frame.bottom + (40 if frame.lying else BOTTOM))
