"""The figure of a study: a panel for each score, a dot for each seed, a bar at their mean; `figure.svg.j2` draws it.

Where the study has a grid, its points are on the axis and each arm is a line; else arms are on the axis. Names that are
too long to stand side by side are listed one below the other, with the scores to their right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adclr.report.charts import TEMPLATES, Axis, format_number
from adclr.study.study_file import Study
from adclr.study.table import Rows, Sample

WIDTH, HEIGHT, COLUMNS = 430, 280, 2  # pixels of a panel; panels side by side
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 40, 66
LINE_HEIGHT = 22  # pixels from one line of names to the next
LETTER_WIDTH = 6.8  # pixels, about
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's palette

Point = tuple[float, float]  # pixels: x, y
Series = Sequence[Sample]  # scores of an arm, a sample for each name on the axis


class Label(NamedTuple):
    """A text, where its anchor (start, middle or end) is, and its color."""

    x: float
    y: float
    anchor: str
    text: str
    color: str = "black"


@dataclass(frozen=True)
class Marks:
    """A series in pixels."""

    color: str
    line: str  # points of a polyline through the means; empty where names are not numbers
    dots: list[Point]  # seeds
    means: list[str]  # paths of short bars


@dataclass(frozen=True)
class Panel:
    """Scores of one evaluation, in pixels."""

    width: float
    height: float
    labels: list[Label]
    grid: list[str]  # paths of the lines at ticks
    control: str | None  # path of the line at the mean of the control
    marks: list[Marks]
    frame: str  # path of the axes


class LegendEntry(NamedTuple):
    """A name with its sign: a dot of a color, or the dashed line of the control."""

    x: float
    y: float
    name: str
    color: str | None  # None for the control
    indent: int  # pixels from the sign to the name


def draw_figure(study: Study, rows: Rows) -> str | None:
    """Return the figure as SVG; None if there are no scores. Arms without scores are left out."""
    outline, points = study.outline, study.points
    labels = {(cell.arm, cell.point): cell.label for cell in study.cells}
    scored = {label for label, samples in rows.items() if any(sample.by_seed for sample in samples.values())}
    arms = [arm for arm in study.arms if any(labels[arm, point] in scored for point in points)]
    prefix = _common_prefix(points)
    panels = []
    for title in outline.evaluations:
        control = rows[outline.control][title].mean if outline.control else None
        if len(points) > 1:
            series = [[rows[labels[arm, point]][title] for point in points] for arm in arms]
            names = [point.removeprefix(prefix) for point in points]
        else:
            series = [[rows[labels[arm, points[0]]][title] for arm in arms]]
            names = [arm or study.cells[0].label for arm in arms]
        if any(sample.by_seed for samples in series for sample in samples):
            panels.append(_layout_panel(title, names, series, control, prefix.rstrip("=")))
    if not panels:
        return None
    columns = min(COLUMNS, len(panels)) if panels[0].width <= WIDTH else 1
    legend_names = [arm for arm in arms if arm] if len(points) > 1 else []
    longest_name = max(map(len, [*legend_names, outline.control or ""]))
    longest = max(1.15 * len(outline.title), 5 + longest_name)  # letters; the title is bold
    width = max(columns * panels[0].width, LEFT + LETTER_WIDTH * longest)
    legend, y = _layout_legend(legend_names if len(legend_names) > 1 else [], outline.control, width)
    positioned = []
    for start in range(0, len(panels), columns):
        row = panels[start : start + columns]
        positioned += [(column * panel.width, y, panel) for column, panel in enumerate(row)]
        y += max(panel.height for panel in row)
    return TEMPLATES.get_template("study/figure.svg.j2").render(
        title=outline.title, left=LEFT, width=width, height=y, legend=legend, panels=positioned
    )


def _common_prefix(points: Sequence[str]) -> str:
    """Return 'num_queries=' if all points are values of that one setting, else ''."""
    prefixes = {point.split("=")[0] + "=" for point in points if "=" in point}
    return prefixes.pop() if len(prefixes) == 1 and not any("," in point for point in points) else ""


def _layout_legend(names: Sequence[str], control: str | None, width: float) -> tuple[list[LegendEntry], float]:
    """Return the entries below the title, in lines of at most `width` pixels, and the y at which they end."""
    x, y = float(LEFT), 20.0 + LINE_HEIGHT
    signs: list[tuple[str, str | None, int]] = [(name, _color(index), 18) for index, name in enumerate(names)]
    if control:
        signs.append((control, None, 30))
    entries = []
    for name, color, indent in signs:
        entry_width = indent + LETTER_WIDTH * len(name)
        if x > LEFT and x + entry_width > width:
            x, y = float(LEFT), y + LINE_HEIGHT
        entries.append(LegendEntry(x, y, name, color, indent))
        x += entry_width + 20
    return entries, y if entries else y - LINE_HEIGHT


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _layout_panel(
    title: str, names: Sequence[str], series: Sequence[Series], control: float | None, axis_title: str
) -> Panel:
    count = len(names)
    step = (WIDTH - LEFT - RIGHT) / count  # pixels from name to name
    longest = LETTER_WIDTH * max(len(name) for name in names)
    listed = longest > step - 6  # names one below the other, scores to their right
    low, high = _score_range(series, control)
    if listed:
        step = max(LINE_HEIGHT, 12.0 * len(series))
        left, right, bottom = longest + 20, longest + 20 + WIDTH - LEFT - RIGHT, TOP + step * count
        scores, positions = Axis(low, high, left, right), Axis(0, count, TOP, bottom)
    else:
        left, right, bottom = LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM
        scores, positions = Axis(low, high, bottom, TOP), Axis(0, count, left, right)

    def point(position: float, score: float) -> Point:
        a, b = positions.at(position), scores.at(score)
        return (b, a) if listed else (a, b)

    def line_at(score: float) -> str:
        (x, y), (to_x, to_y) = point(0, score), point(count, score)
        return f"M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"

    ticks = scores.ticks()
    labels = [Label(left, TOP - 12, "start", title)]
    for tick in ticks:
        x, y = point(0, tick)
        text = format_number(tick)
        labels.append(Label(x, bottom + 16, "middle", text) if listed else Label(x - 6, y + 4, "end", text))
    for index, name in enumerate(names):
        x, y = point(index + 0.5, low)
        labels.append(Label(x - 8, y + 4, "end", name) if listed else Label(x, y + 16, "middle", name))
    if axis_title and listed:
        labels.append(Label(left - 8, TOP - 12, "end", axis_title, "#444"))
    elif axis_title:
        labels.append(Label((left + right) / 2, bottom + 36, "middle", axis_title, "#444"))
    marks = []
    for index, samples in enumerate(series):
        shift = (index - (len(series) - 1) / 2) * min(14.0, step / (len(series) + 1)) / step
        shifted = [(number + 0.5 + shift, sample) for number, sample in enumerate(samples)]
        means = [point(position, sample.mean) for position, sample in shifted if sample.mean is not None]
        dots = [point(position, score) for position, sample in shifted for score in sample.by_seed.values()]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in means) if axis_title else ""
        bars = [f"M{x:.1f} {y - 6:.1f}v12" if listed else f"M{x - 9:.1f} {y:.1f}h18" for x, y in means]
        marks.append(Marks(_color(index), line, dots, bars))
    return Panel(
        right + RIGHT,
        bottom + (40 if listed else BOTTOM),
        labels,
        [line_at(tick) for tick in ticks],
        None if control is None else line_at(control),
        marks,
        f"M{left:.1f} {TOP:.1f}V{bottom:.1f}H{right:.1f}",
    )


def _score_range(series: Sequence[Series], control: float | None) -> tuple[float, float]:
    """Return the ends of the axis of scores: the lowest and the highest, with a margin."""
    values = [score for samples in series for sample in samples for score in sample.by_seed.values()]
    values += [] if control is None else [control]
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or max(abs(high) * 0.05, 1e-3)
    return low - margin, high + margin
