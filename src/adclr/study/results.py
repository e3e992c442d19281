"""What is kept of every run: RESULTS/runs/KEY.json, small enough to be committed. Knows nothing of torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from adclr.config import UserError
from adclr.runs import Run, read_json, write_json
from adclr.study.outline import TRAINING, Cell, Evaluation, Study

# What is kept of each start: versions and facts, no paths of the machine
FACTS = ["started", "adclr", "commit", "python", "packages", "from_step", "device", "precision", "processes"]
FACTS += ["micro_batch_size", "compiled", "images", "collection"]
PROBES = ("epoch", "knn_top1", "image_matching", "patch_matching", "incontext_miou")


class Scored(BaseModel):
    scores: dict[str, Any]
    built: dict[str, Any] = {}  # all its settings; results of before that was kept have none


class Training(BaseModel):
    last: dict[str, Any] = {}


class Kept(BaseModel):
    """What a file must be; it may say more."""

    settings: dict[str, Any]
    training: Training
    evaluations: dict[str, Scored]
    provenance: list[dict[str, Any]] = []


class Results:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, cell: Cell) -> Path:
        return self.folder / "runs" / f"{cell.key}.json"

    def of(self, cell: Cell) -> dict[str, Any] | None:
        """What is known of a run; None if that is nothing."""
        file = self.file(cell)
        if not file.exists():
            return None
        try:
            found: dict[str, Any] = json.loads(file.read_bytes())
            Kept.model_validate(found)
        except (ValueError, RecursionError):
            raise UserError(f"{file} is not the result of a run; delete it, and the run is made again") from None
        wanted = cell.known_by["settings"]
        for path, value in found["settings"].items():
            # a default that was another when it was made: the key does not tell
            if path in wanted and wanted[path] != value:
                raise UserError(
                    f"{file} was made with {path}={value}, which is {wanted[path]} now; delete it or set {path} in the "
                    "study"
                )
        return found

    def missing(self, cell: Cell, evaluations: Mapping[str, Evaluation]) -> list[Evaluation]:
        """What is not yet scored of a run; if it was not trained at all, everything, be it only the training."""
        found = self.of(cell)
        scored = {} if found is None else found["evaluations"]
        wanted = {one.key: one for one in evaluations.values()}  # two columns may be of one evaluation
        for key, one in wanted.items():
            built = one.computed() if key in scored and one.name != TRAINING else {}
            for name, value in scored.get(key, {}).get("built", {}).items():
                if name in built and built[name] != value:
                    raise UserError(
                        f"{self.file(cell)} has scores of {one.name} made with {name}={value}, which is {built[name]} "
                        f"now; delete them there or set {name} in the study"
                    )
        return [one for key, one in wanted.items() if found is None or (one.name != TRAINING and key not in scored)]

    def complete(self, study: Study, cell: Cell) -> bool:
        return not self.missing(cell, study.outline.evaluations)


def value(found: Mapping[str, Any] | None, evaluation: Evaluation) -> float | None:
    """The number of a column."""
    if found is None:
        return None
    if evaluation.name == TRAINING:
        number = found["training"].get("last", {}).get(evaluation.score)
    else:
        scores = found["evaluations"].get(evaluation.key, {}).get("scores", {})
        number = scores.get(evaluation.score)
        if scores and number is None:
            raise UserError(f"{evaluation.name} has no score '{evaluation.score}'; it has: {', '.join(sorted(scores))}")
    return float(number) if isinstance(number, int | float) and math.isfinite(number) else None


def keep_training(file: Path, known_by: Mapping[str, Any], run: Run, untrained: bool) -> None:
    """Begins the result of a run that has ended."""
    starts = [] if untrained else [{name: start.get(name) for name in FACTS} for start in run.starts()]
    last: dict[str, Any] = {}
    for row in run.rows("metrics.jsonl"):
        last |= {name: number for name, number in row.items() if isinstance(number, int | float)}
    summed = read_json(run.path / "results.json") if run.finished else {}
    training = {
        "steps": summed.get("steps", 0),
        "epochs": summed.get("epochs", 0),
        "minutes": summed.get("seconds_training", 0.0) / 60,
        "images_per_second": summed.get("images_per_second"),
        "gib": summed.get("gpu_gib"),
        "last": last,
        "probes": [
            {name: row[name] for name in PROBES if name in row}
            for row in run.rows("metrics.jsonl")
            if any(name in row for name in PROBES[1:])
        ],
    }
    write_json(file, {**known_by, "training": training, "evaluations": {}, "provenance": starts})


def keep_scores(file: Path, evaluation: Evaluation, scores: Mapping[str, Any], seconds: float) -> None:
    """Adds the numbers of an evaluation, without those of every class."""
    found = read_json(file)
    numbers = {name: number for name, number in scores.items() if isinstance(number, int | float)}
    found["evaluations"][evaluation.key] = {
        "name": evaluation.name,
        "data": evaluation.data,
        "recipe": evaluation.recipe,
        "settings": evaluation.settings,
        "built": evaluation.computed(),
        "scores": numbers,
        "seconds": round(seconds, 1),
    }
    write_json(file, found)
