"""All that a run has written, read for the report.

Files may be of another version or damaged; whatever can be read is used.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from adclr import evals
from adclr.config import parsing
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.report import health
from adclr.system.files import read_json
from adclr.system.runs import STOPPED, Run

PICTURE_FOLDER = "pictures"  # inside the run directory
MAX_EVALUATIONS = 200  # files read
MAX_BYTES = 2**22  # of a file of scores or of a picture
STALE_SECONDS = 600  # without a new line of metrics.jsonl an unfinished run counts as stopped

# settings of evaluations that do not change their scores, or that other columns show
HIDDEN_SETTINGS = {"weights", "data", "from_scratch", "partial", "device", "num_workers", "max_unreadable", "pictures"}

# `seconds_NAME` of timing.jsonl: time that did not go into steps; that of probes is not part of its `seconds`
OVERHEADS = ("waiting_for_images", "looking", "saving", "drawing", "probing")

Points = list[tuple[float, float]]  # (epoch, value)


class EvaluationRecord(NamedTuple):
    """Scores of one evaluation of the run."""

    name: str
    data: str
    scores: dict[str, float]
    started: str
    settings: dict[str, Any]  # by full name, without HIDDEN_SETTINGS
    from_scratch: bool


class Strip(NamedTuple):
    """Attention maps and components of fixed images after a step, stacked in one JPEG file."""

    step: int
    path: Path


@dataclass(frozen=True)
class RunRecord:
    """All that the report shows of a run."""

    name: str
    path: Path
    settings: dict[str, Any]  # by full name
    starts: list[dict[str, Any]]  # provenance of the first start and of every resume
    results: dict[str, Any] | None  # None until it has finished
    curves: dict[str, Points]  # numbers of metrics.jsonl and timing.jsonl by name
    health_rows: list[dict[str, float]]  # the first is of the untrained network
    messages: list[str]  # texts among the metrics
    evaluations: list[EvaluationRecord]
    strips: list[Strip]
    num_unreadable: int  # images
    step: int  # the last one done
    steps_per_epoch: float | None  # None if unknown
    seconds: float  # of training
    overheads: dict[str, float]  # seconds by `OVERHEADS`
    state: str  # finished, training or stopped

    def last_value(self, name: str) -> float | None:
        """Return the last value of a curve, None if there is no such curve."""
        points = self.curves.get(name)
        return points[-1][1] if points else None

    @property
    def epochs(self) -> float | None:
        """Return the number of epochs done."""
        return self.step / self.steps_per_epoch if self.steps_per_epoch else None

    @property
    def knn_top1(self) -> float | None:
        """Return the kNN accuracy in percent: that of the last probe, else that of the newest evaluation."""
        probed = self.last_value("knn_top1")
        evaluated = [item for item in self.evaluations if "knn_top1" in item.scores and not item.from_scratch]
        if probed is not None or not evaluated:
            return probed
        return max(evaluated, key=lambda item: item.started).scores["knn_top1"]


def read_record(path: str | Path) -> RunRecord:
    """Read the files of a run directory."""
    run = Run(path)
    if not run.path.is_dir():
        raise UserError(f"run {run.path} does not exist; give the directory of a run")
    metrics, timing = _read_rows(run, "metrics.jsonl"), _read_rows(run, "timing.jsonl")
    settings = _read_settings(run)
    if not metrics and not settings:
        raise UserError(
            f"{run.path} holds no run: neither settings.yaml nor metrics.jsonl is there; give another directory"
        )
    starts = _read_starts(run)
    steps_per_epoch = _steps_per_epoch(metrics, settings, starts)
    # a run that stopped before its first line of metrics.jsonl has one of timing.jsonl
    steps = [step for row in (*metrics, *timing) if (step := _number(row.get("step"))) is not None]
    results = _read_object(run.path / "results.json")
    numbers = [_numbers(row) for row in metrics]
    return RunRecord(
        name=run.path.name or run.path.resolve().name,
        path=run.path,
        settings=settings,
        starts=starts,
        results=results,
        curves=_curves([*numbers, *map(_numbers, timing)], 1 / (steps_per_epoch or 1.0)),
        health_rows=[row for row in numbers if health.is_measured(row)],
        messages=_messages(metrics),
        evaluations=_read_evaluations(run.path / "evals"),
        strips=list_strips(run.path / PICTURE_FOLDER),
        num_unreadable=len(_read_rows(run, "quarantine.jsonl")),
        step=int(max(steps, default=0)),
        steps_per_epoch=steps_per_epoch,
        seconds=_sum(timing, "seconds"),
        overheads={name: _sum(timing, f"seconds_{name}") for name in OVERHEADS},
        state="finished" if results is not None else _unfinished_state(run, metrics),
    )


def _steps_per_epoch(
    metrics: Sequence[dict[str, Any]], settings: Mapping[str, Any], starts: Sequence[dict[str, Any]]
) -> float | None:
    """Return step / epoch of the last row that has both; before there is one, images / batch size."""
    for row in reversed(metrics):
        step, epoch = _number(row.get("step")), _number(row.get("epoch"))
        if step and epoch and step > 0 and epoch > 0:
            return step / epoch
    images = _number(starts[-1].get("images")) if starts else None
    batch = _number(settings.get("train.batch_size"))
    return images // batch or None if images and batch and batch > 0 else None


def _number(value: Any) -> float | None:
    """Return a value as a number that can be drawn, None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        return None
    return float(value)


def _numbers(row: Mapping[Any, Any]) -> dict[str, float]:
    return {str(name): number for name, value in row.items() if (number := _number(value)) is not None}


def _sum(rows: Iterable[dict[str, Any]], name: str) -> float:
    return sum(_number(row.get(name)) or 0.0 for row in rows)


def _read_rows(run: Run, name: str) -> list[dict[str, Any]]:
    try:
        return list(run.rows(name))
    except OSError:
        return []


def _read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object of at most `MAX_BYTES`; None if it is something else or damaged."""
    try:
        value = read_json(path) if path.stat().st_size <= MAX_BYTES else None
    except (OSError, UserError):
        return None
    return value if isinstance(value, dict) else None


def _read_settings(run: Run) -> dict[str, Any]:
    """Read the settings unvalidated: a run of another version has settings that are unknown here."""
    try:
        text = (run.path / "settings.yaml").read_text(encoding="utf-8", errors="replace")
        values = parsing.load_yaml(text, "settings.yaml")
    except (OSError, UserError):
        return {}
    return parsing.current_names(Settings, parsing.flatten(values)) if isinstance(values, Mapping) else {}


def _read_starts(run: Run) -> list[dict[str, Any]]:
    try:
        return [start for start in run.starts() if isinstance(start, dict)]
    except (OSError, UserError):
        return []


def _curves(rows: Iterable[dict[str, float]], epochs_per_step: float) -> dict[str, Points]:
    curves: dict[str, Points] = {}
    for row in rows:
        if "step" not in row:
            continue
        epoch = row.get("epoch", row["step"] * epochs_per_step)
        for name, value in row.items():
            if name not in ("step", "epoch"):
                curves.setdefault(name, []).append((epoch, value))
    return {name: sorted(points) for name, points in curves.items()}


def _messages(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return the texts among the metrics, such as those about its health, each once."""
    texts = [
        value.strip()[:500]
        for row in rows
        if _number(row.get("step")) is not None
        for value in row.values()
        if isinstance(value, str) and value.strip()
    ]
    return list(dict.fromkeys(texts))


def _read_evaluations(folder: Path) -> list[EvaluationRecord]:
    evaluations = []
    for path in sorted(folder.glob("*/*.json"))[:MAX_EVALUATIONS]:
        content = _read_object(path) or {}
        scores, settings, provenance = (content.get(part) for part in ("scores", "settings", "provenance"))
        if not isinstance(scores, dict):
            continue
        settings = settings if isinstance(settings, dict) else {}
        provenance = provenance if isinstance(provenance, dict) else {}
        flat = parsing.flatten(settings)
        if path.parent.name in evals.NAMES:
            flat = parsing.current_names(evals.import_evaluation(path.parent.name).Settings, flat)
        shown = {name: value for name, value in flat.items() if name not in HIDDEN_SETTINGS}
        data = str(settings.get("data", "")) or path.stem
        started = str(provenance.get("started", ""))
        from_scratch = str(settings.get("from_scratch")) == "True"
        evaluations.append(EvaluationRecord(path.parent.name, data, _numbers(scores), started, shown, from_scratch))
    return evaluations


def list_strips(folder: Path) -> list[Strip]:
    """Return the strips of a folder in the order of their steps."""
    strips = []
    for path in folder.glob("step_*.jpg") if folder.is_dir() else ():
        number = path.stem.removeprefix("step_")
        if number.isascii() and number.isdecimal() and path.stat().st_size <= MAX_BYTES:
            strips.append(Strip(int(number), path))
    return sorted(strips)


def _unfinished_state(run: Run, metrics: Sequence[dict[str, Any]]) -> str:
    """Return "stopped" if the run says so or has written nothing for a while, else "training"."""
    if metrics and metrics[-1].get(STOPPED) is True:
        return "stopped"
    try:
        age = time.time() - (run.path / "metrics.jsonl").stat().st_mtime
    except OSError:
        return "stopped"
    return "training" if age < STALE_SECONDS else "stopped"


def differing_settings(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return (setting, its value in each run) of the settings that are not the same in all runs."""
    rows = []
    for name in dict.fromkeys(name for record in records for name in record.settings):
        values = [json.dumps(record.settings[name]) if name in record.settings else "–" for record in records]
        if len(set(values)) > 1:
            rows.append((name, values))
    return rows
