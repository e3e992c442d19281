"""What a run left, gathered for a page. Files may be of another version or damaged: what can be read is taken."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from adclr import evals
from adclr.config import sections
from adclr.config.sections import UserError
from adclr.config.settings import Settings
from adclr.system.files import read_json
from adclr.system.runs import STOPPED, Run

PICTURES = "pictures"  # folder of the run
MOST_SCORES = 200  # evaluations read
LARGEST = 2**22  # bytes of a file of scores or of a picture
STALE = 600  # seconds without a line after which an unfinished run is called stopped

# settings of evaluations that say nothing of their scores, or that other columns show
ELSEWHERE = {"weights", "data", "from_scratch", "partial", "device", "num_workers", "max_unreadable", "pictures"}

# what timing.jsonl has of the seconds that went into something else than steps; probes are not part of its `seconds`
PARTS = ("waiting_for_images", "looking", "saving", "drawing", "probing")

Points = list[tuple[float, float]]  # (epoch, value)


class Scores(NamedTuple):
    """One evaluation found beside the run."""

    evaluation: str
    data: str
    numbers: dict[str, float]
    when: str
    settings: dict[str, Any]  # by full name; not those that its other columns show
    from_scratch: bool


class Moment(NamedTuple):
    """Pictures of fixed images at a step."""

    step: int
    file: Path


@dataclass(frozen=True)
class Story:
    name: str
    path: Path
    settings: dict[str, Any]  # by full name
    starts: list[dict[str, Any]]
    results: dict[str, Any] | None  # None while it trains
    curves: dict[str, Points]  # numbers of metrics.jsonl and timing.jsonl by name
    looks: list[dict[str, float]]  # measures of health, the first of the untrained network
    said: list[tuple[float, str]]  # (step, words) that stand in the metrics
    scores: list[Scores]
    moments: list[Moment]
    unreadable: int
    step: int  # the last that was done
    steps_per_epoch: float | None  # None if nothing says so
    seconds: float  # of training
    spent: dict[str, float]  # seconds by `PARTS`
    state: str  # finished, training or stopped

    def last(self, name: str) -> float | None:
        points = self.curves.get(name)
        return points[-1][1] if points else None

    def best(self, name: str) -> float | None:
        return max((value for _, value in self.curves.get(name, ())), default=None)

    @property
    def epochs(self) -> float | None:
        """How many were done."""
        return self.step / self.steps_per_epoch if self.steps_per_epoch else None

    def knn(self) -> float | None:
        """The accuracy of the last probe, or else of the newest evaluation, in percent."""
        probed = self.last("knn_top1")
        evaluated = [one for one in self.scores if "knn_top1" in one.numbers and not one.from_scratch]
        if probed is not None or not evaluated:
            return probed
        return max(evaluated, key=lambda one: one.when).numbers["knn_top1"]


def read(path: str | Path) -> Story:
    run = Run(path)
    if not run.path.is_dir():
        raise UserError(f"run {run.path} does not exist; give the directory of a run")
    metrics, timing = _rows(run, "metrics.jsonl"), _rows(run, "timing.jsonl")
    settings = _settings(run)
    if not metrics and not settings:
        raise UserError(
            f"{run.path} holds no run: neither settings.yaml nor metrics.jsonl is there; give another directory"
        )
    starts = _starts(run)
    steps_per_epoch = _steps_per_epoch(metrics, settings, starts)
    # a run that stopped before its first line of metrics.jsonl has one of timing.jsonl
    steps = [step for row in (*metrics, *timing) if (step := _number(row.get("step"))) is not None]
    results = _object(run.path / "results.json")
    return Story(
        name=run.path.name or run.path.resolve().name,
        path=run.path,
        settings=settings,
        starts=starts,
        results=results,
        curves=_curves([*metrics, *timing], 1 / (steps_per_epoch or 1.0)),
        looks=_looks(metrics),
        said=_said(metrics),
        scores=_scores(run.path / "evals"),
        moments=read_moments(run.path / PICTURES),
        unreadable=len(_rows(run, "quarantine.jsonl")),
        step=int(max(steps, default=0)),
        steps_per_epoch=steps_per_epoch,
        seconds=_sum(timing, "seconds"),
        spent={name: _sum(timing, f"seconds_{name}") for name in PARTS},
        state="finished" if results is not None else _state(run, metrics),
    )


def _steps_per_epoch(
    metrics: Iterable[dict[str, Any]], settings: Mapping[str, Any], starts: Sequence[dict[str, Any]]
) -> float | None:
    """By the last line that has an epoch; before there is one, by the images and the batch size."""
    rows = [(_number(row.get("step")), _number(row.get("epoch"))) for row in metrics]
    for step, epoch in reversed(rows):
        if step and epoch and step > 0 and epoch > 0:
            return step / epoch
    images = _number(starts[-1].get("images")) if starts else None
    batch = _number(settings.get("train.batch_size"))
    return images // batch or None if images and batch and batch > 0 else None


def _number(value: Any) -> float | None:
    """What can be drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        return None
    return float(value)


def _rows(run: Run, name: str) -> list[dict[str, Any]]:
    try:
        return list(run.rows(name))
    except OSError:
        return []


def _object(path: Path) -> dict[str, Any] | None:
    """A JSON object in a file of bearable size."""
    try:
        found = read_json(path) if path.stat().st_size <= LARGEST else None
    except (OSError, UserError):
        return None
    return found if isinstance(found, dict) else None


def _settings(run: Run) -> dict[str, Any]:
    """As they are written: a run of another version has settings that this one does not know."""
    try:
        text = (run.path / "settings.yaml").read_text(encoding="utf-8", errors="replace")
        values = sections.load_yaml(text, "settings.yaml")
    except (OSError, UserError):
        return {}
    return sections.current_names(Settings, sections.flatten(values)) if isinstance(values, Mapping) else {}


def _starts(run: Run) -> list[dict[str, Any]]:
    try:
        return [start for start in run.starts() if isinstance(start, dict)]
    except (OSError, UserError):
        return []


def _curves(rows: Iterable[dict[str, Any]], per_step: float) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for row in rows:
        step = _number(row.get("step"))
        if step is None:
            continue
        epoch = _number(row.get("epoch"))
        for name, held in row.items():
            value = _number(held)
            if name not in ("step", "epoch") and value is not None:
                found.setdefault(name, []).append((step * per_step if epoch is None else epoch, value))
    return {name: sorted(points) for name, points in found.items()}


def _looks(rows: Iterable[dict[str, Any]]) -> list[dict[str, float]]:
    """Rows in which the health was measured, whole."""
    found = []
    for row in rows:
        numbers = {name: value for name, held in row.items() if (value := _number(held)) is not None}
        if numbers.keys() >= {"target_kl", "target_entropy"}:
            found.append(numbers)
    return found


def _said(rows: Iterable[dict[str, Any]]) -> list[tuple[float, str]]:
    """Words that were written with the numbers, such as those about its health; each once, where it was first said."""
    found: dict[str, float] = {}
    for row in rows:
        step = _number(row.get("step"))
        for value in row.values() if step is not None else ():
            if isinstance(value, str) and value.strip():
                found.setdefault(value.strip()[:500], step or 0.0)
    return [(step, words) for words, step in found.items()]


def _scores(folder: Path) -> list[Scores]:
    found = []
    for path in sorted(folder.glob("*/*.json"))[:MOST_SCORES]:
        held = _object(path) or {}
        scores = held.get("scores")
        if not isinstance(scores, dict):
            continue
        numbers = {str(name): value for name, score in scores.items() if (value := _number(score)) is not None}
        data, when = _inner(held, "settings", "data") or path.stem, _inner(held, "provenance", "started")
        from_scratch = _inner(held, "settings", "from_scratch") == "True"
        stored = held.get("settings")
        settings = sections.flatten(stored) if isinstance(stored, Mapping) else {}
        if path.parent.name in evals.NAMES:
            settings = sections.current_names(evals.module(path.parent.name).Settings, settings)
        shown = {key: value for key, value in settings.items() if key not in ELSEWHERE}
        found.append(Scores(path.parent.name, data, numbers, when, shown, from_scratch))
    return found


def _inner(held: Mapping[str, Any], part: str, name: str) -> str:
    inside = held.get(part)
    return str(inside.get(name, "")) if isinstance(inside, Mapping) else ""


def read_moments(folder: Path) -> list[Moment]:
    """In the order of their steps."""
    found = []
    for path in folder.glob("step_*.jpg") if folder.is_dir() else ():
        number = path.stem.removeprefix("step_")
        if number.isascii() and number.isdecimal() and path.stat().st_size <= LARGEST:
            found.append(Moment(int(number), path))
    return sorted(found)


def _sum(rows: Iterable[dict[str, Any]], name: str) -> float:
    return sum(_number(row.get(name)) or 0.0 for row in rows)


def _state(run: Run, metrics: Sequence[dict[str, Any]]) -> str:
    """Of a run that has not finished: stopped if it says so, or if it has written nothing for a while."""
    if metrics and metrics[-1].get(STOPPED) is True:
        return "stopped"
    try:
        return "training" if time.time() - (run.path / "metrics.jsonl").stat().st_mtime < STALE else "stopped"
    except OSError:
        return "stopped"


def differences(stories: list[Story]) -> list[tuple[str, list[str]]]:
    """(setting, its value in each run) of the settings that are not the same in all."""
    names = dict.fromkeys(name for story in stories for name in story.settings)
    rows = []
    for name in names:
        values = [json.dumps(story.settings[name]) if name in story.settings else "–" for story in stories]
        if len(set(values)) > 1:
            rows.append((name, values))
    return rows


def changed(story: Story, defaults: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(setting, value, default) of the settings that are not the default's."""
    return [
        (name, value, defaults.get(name))
        for name, value in story.settings.items()
        if name not in defaults or defaults[name] != value
    ]
