"""The report as one self-contained HTML page: `page.html.j2` with the data of runs."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from markupsafe import Markup

from adclr import __version__, evals
from adclr.config.distillation import settings_class
from adclr.config.parsing import flatten
from adclr.data.jpeg_header import read_header
from adclr.evals.score_text import is_percent
from adclr.report import metrics
from adclr.report.charts import TEMPLATES, Chart, Line, format_number, layout_chart
from adclr.report.metrics import Metric
from adclr.report.record import EvaluationRecord, RunRecord, Strip, differing_settings
from adclr.system import outputs

# cells of a strip, of each image
STRIP_ROWS = {
    "[CLS]": "attention of [CLS]",
    "query": "attention of a query",
    "components": "principal components of the patches",
}
STRIP_WIDTH = 104  # pixels on the page
MAX_STRIPS = 10  # shown of a run
# how `record.OVERHEADS` are called on the page
OVERHEAD_NAMES = {
    "waiting_for_images": "waiting for images",
    "looking": "measuring health",
    "saving": "saving checkpoints",
    "drawing": "pictures and this page",
    "probing": "probes",
}
ALWAYS_SHOWN = ("head", "how", "epochs")  # settings of evaluations, also at their defaults
START_FIELDS = ("started", "from_step", "device", "precision", "processes", "images")  # of provenance.json


def render_page(records: Sequence[RunRecord]) -> str:
    """Return the report of one run, or of several side by side."""
    return TEMPLATES.get_template("report/page.html.j2").render(
        title=records[0].name if len(records) == 1 else f"{len(records)} runs",
        generator=outputs.author_words("report"),
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        style=_read_asset("style.css"),
        script=_read_asset("chart.js"),
        single=len(records) == 1,
        runs=[_describe_run(record) for record in records],
        legend=[Line(record.name, [], style) for style, record in enumerate(records)],
        differences=differing_settings(records),
        losses=_layout_charts(records, metrics.loss_metrics(records)),
        scores=_layout_charts(records, metrics.SCORES),
        health=_layout_charts(records, metrics.health_metrics(records)),
        speed=_layout_charts(records, metrics.SPEED),
        schedules=_layout_charts(records, metrics.SCHEDULES),
        evaluations=_evaluation_rows(records),
        strip_rows=STRIP_ROWS,
        start_fields=[name.replace("_", " ") for name in START_FIELDS],
    )


def _describe_run(record: RunRecord) -> dict[str, Any]:
    """Return what the page shows of a single run, beside its curves."""
    defaults = flatten(settings_class(record.settings)().model_dump(mode="json"))
    return {
        "name": record.name,
        "path": record.path,
        "recipe": record.settings.get("recipe") or "no recipe",
        "facts": _facts(record),
        "statements": metrics.describe_status(record),
        "film": _film(record),
        "time": format_run_time(record.seconds + record.overheads["probing"]),
        "time_shares": _time_shares(record),
        "settings": [(name, _text(value)) for name, value in record.settings.items()],
        "changed": [
            (name, _text(value), _text(defaults.get(name)))
            for name, value in record.settings.items()
            if name not in defaults or defaults[name] != value
        ],
        "starts": [_start_row(start) for start in record.starts],
        "packages": _packages(record.starts[-1]) if record.starts else "",
    }


def _read_asset(name: str) -> Markup:
    return Markup((resources.files("adclr") / "report" / name).read_text(encoding="utf-8"))


def format_run_time(seconds: float) -> str:
    """Return a duration such as `1 h 02 min`."""
    hours, minutes = int(seconds // 3600), int(seconds % 3600 // 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds % 60:.0f} s" if minutes else f"{seconds:.1f} s"


def _facts(record: RunRecord) -> dict[str, str]:
    """Return the numbers at the top of the page, by name."""
    speed = record.results and record.results.get("images_per_second")
    if not isinstance(speed, int | float):
        speed = record.last_value("images_per_second")
    loss, total = record.last_value("loss"), record.settings.get("train.epochs")
    first_step = record.last_value("seconds_to_first_step")  # of the last start
    epochs = "–" if record.epochs is None else format_number(round(record.epochs, 1))
    return {
        "state": record.state,
        "epochs": f"{epochs} of {total}" if total else epochs,
        "steps": str(record.step),
        "loss": "–" if loss is None else format_number(loss),
        "kNN": "–" if record.knn_top1 is None else f"{record.knn_top1:.1f} %",
        "images/s": "–" if speed is None else f"{speed:.0f}",
        "time": format_run_time(record.seconds),
        **({} if first_step is None else {"first step after": format_run_time(first_step)}),
    }


def _layout_charts(records: Sequence[RunRecord], shown: Mapping[str, Metric]) -> list[Chart]:
    charts = []
    for name, metric in shown.items():
        lines = [
            Line(record.name, record.curves[name], style)
            for style, record in enumerate(records)
            if any(value for _, value in record.curves.get(name, ()))  # a loss that is not used is 0 throughout
        ]
        axis = metric.healthy, metric.floor, metric.level
        chart = layout_chart(metric.title, lines, metric.meaning, *axis, metric.remedy)
        if chart is not None:
            charts.append(chart)
    return charts


def _time_shares(record: RunRecord) -> dict[str, float]:
    """Return how the time of a run was spent, as shares by name; nothing if it is unknown."""
    if not record.seconds:
        return {}
    overheads = {name: record.overheads[part] for part, name in OVERHEAD_NAMES.items()}
    total = record.seconds + record.overheads["probing"]
    parts = {"steps": max(0.0, total - sum(overheads.values())), **overheads}
    return {name: min(1.0, seconds / total) for name, seconds in parts.items()}


class Film(NamedTuple):
    """Strips of a run side by side: the images themselves, then their maps after some steps."""

    strips: list[tuple[str, str]]  # (label, JPEG file in base64)
    row_names: list[str]
    height: float  # pixels of a strip on the page


def _film(record: RunRecord) -> Film | None:
    if not record.strips:
        return None
    first, *later = record.strips
    every = max(1, -(-len(later) // (MAX_STRIPS - 1)))
    chosen = [first, *later[::-1][::every][::-1]]  # the last one always
    files = [("images", first.path.with_name("images.jpg"))]
    files += [(_strip_label(strip, record.steps_per_epoch), strip.path) for strip in chosen]
    strips, header = [], None
    for label, path in files:
        try:
            content = path.read_bytes()
        except OSError:
            continue
        strips.append((label, base64.b64encode(content).decode()))
        header = header or read_header(content)
    if header is None or not header.width:
        return Film(strips, [], 0)
    cells = header.height // header.width  # cells are squares
    return Film(strips, (list(STRIP_ROWS) * cells)[:cells], header.height * STRIP_WIDTH / header.width)


def _strip_label(strip: Strip, steps_per_epoch: float | None) -> str:
    if not steps_per_epoch:
        return f"step {strip.step}"
    return f"epoch {format_number(round(strip.step / steps_per_epoch, 1))}"


class EvaluationRow(NamedTuple):
    """A row of the table of evaluations."""

    run: str
    name: str
    data: str
    settings: str
    scores: list[tuple[str, str]]
    started: str


def _evaluation_rows(records: Sequence[RunRecord]) -> list[EvaluationRow]:
    rows = []
    evaluations = [evaluation for record in records for evaluation in record.evaluations]
    for record in records:
        for evaluation in record.evaluations:
            others = [other.settings for other in evaluations if other.name == evaluation.name]
            scores = [
                (name, f"{value:.2f} %" if is_percent(name) else format_number(value))
                for name, value in evaluation.scores.items()
                if name != "num_steps"  # which is shown with the settings
            ]
            name = evaluation.name + (", from scratch" if evaluation.from_scratch else "")
            settings = _distinctive_settings(evaluation, others)
            rows.append(EvaluationRow(record.name, name, evaluation.data, settings, scores, evaluation.started[:16]))
    return rows


def _distinctive_settings(evaluation: EvaluationRecord, others: Sequence[Mapping[str, Any]]) -> str:
    """Return the settings that differ from those of others of its name, or from the default, and its steps."""
    words = []
    defaults = _default_settings(evaluation.name)
    for name, value in evaluation.settings.items():
        differs = any(other.get(name) != value for other in others) or (name in defaults and defaults[name] != value)
        if value is not None and name != "steps" and (name in ALWAYS_SHOWN or differs):
            words.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
    if "num_steps" in evaluation.scores:
        words.append(f"{evaluation.scores['num_steps']:.0f} steps")
    return ", ".join(words)


@cache
def _default_settings(evaluation: str) -> Mapping[str, Any]:
    """Return the default settings of an evaluation by full name; none if this version does not have it."""
    if evaluation not in evals.NAMES:
        return {}
    return flatten(evals.import_evaluation(evaluation).Settings().model_dump(mode="json"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _start_row(start: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return the cells of a start of the run, and its command."""
    cells = [str(start.get(name, "–")) for name in START_FIELDS]
    cells.append(str(start.get("commit") or start.get("adclr") or "–")[:12])
    words = start.get("command")
    return cells, " ".join(["adclr", *map(str, words[1:])]) if isinstance(words, list) and words else "–"


def _packages(start: Mapping[str, Any]) -> str:
    """Return the versions of packages at a start."""
    packages = start.get("packages")
    versions = [f"{name} {version}" for name, version in packages.items()] if isinstance(packages, dict) else []
    first = [f"adclr {start.get('adclr')}", f"Python {start.get('python')}"]
    return ", ".join([*first, *versions, str(start.get("platform"))])
