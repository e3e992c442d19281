"""Results of runs: RESULTS/runs/KEY.json, small enough to be committed. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from adclr.config import parsing
from adclr.config.parsing import UserError
from adclr.study.fingerprints import Fingerprints, combine_fingerprints, is_same, shorten
from adclr.study.study_file import TRAINING, Cell, Evaluation, Study
from adclr.system.files import read_json, write_json
from adclr.system.runs import Run

# Of the provenance of each start: versions and facts, no paths of the machine
START_FIELDS = ["started", "adclr", "commit", "python", "packages", "from_step", "device", "precision", "processes"]
START_FIELDS += ["micro_batch_size", "compiled", "images", "collection"]
PROBE_FIELDS = ("epoch", "knn_top1", "image_matching", "patch_matching", "incontext_miou")


class StoredScores(BaseModel):
    """Scores of an evaluation in a result."""

    scores: dict[str, Any]
    built: dict[str, Any] = {}  # all its settings; absent from older results


class StoredTraining(BaseModel):
    """Numbers of the training in a result."""

    last: dict[str, Any] = {}


class StoredResult(BaseModel):
    """The fields that a result must have; it may have more."""

    settings: dict[str, Any]
    training: StoredTraining
    evaluations: dict[str, StoredScores]
    provenance: list[dict[str, Any]] = []


class Results:
    """Results of the runs of a study, on data of these fingerprints.

    A result has the fingerprints of its data. For other data of the same name it is not used, and new results are
    written beside it: RESULTS/runs/KEY-FINGERPRINT.json, and in a file evaluations by KEY-FINGERPRINT. Results without
    fingerprints, of version 0.1, are used as they are.
    """

    def __init__(self, folder: Path, fingerprints: Fingerprints | None = None) -> None:
        self.folder, self.fingerprints = folder, fingerprints or Fingerprints()

    def run_name(self, cell: Cell) -> str:
        """Return the name of a run here: its key, with the fingerprint behind it if the key is that of other data."""
        fingerprint = self.fingerprint(cell)
        if fingerprint is None:
            return cell.key
        name = f"{cell.key}-{shorten(fingerprint)}"
        return name if self._path(name).exists() or self._has_other_data(cell) else cell.key

    def fingerprint(self, cell: Cell) -> str | None:
        """Return the fingerprint of the images that a run is trained on, and those of its source if they are others."""
        if cell.untrained:
            return None
        images = self.fingerprints.training.get(cell.data)
        if cell.source is None or cell.source.untrained or cell.source.data == cell.data or images is None:
            return images
        source = self.fingerprint(cell.source)
        return None if source is None else combine_fingerprints(images, source)

    def _path(self, name: str) -> Path:
        return self.folder / "runs" / f"{name}.json"

    def file(self, cell: Cell) -> Path:
        """Return the file of a result, which need not exist."""
        return self._path(self.run_name(cell))

    def _has_other_data(self, cell: Cell) -> bool:
        """Return whether the first result of a run is of other images than the current ones."""
        try:
            return not _is_of(json.loads(self._path(cell.key).read_bytes()), self.fingerprint(cell))
        except (OSError, ValueError, RecursionError):  # absent, or damaged, which `read` reports
            return False

    def count_other_data(self, cells: Iterable[Cell]) -> int:
        """Return how many runs have results on other images of the same name only."""
        return sum(self._has_other_data(cell) and not self.file(cell).exists() for cell in cells)

    def count_scores_of_other_data(self, cells: Iterable[Cell], evaluation: Evaluation) -> int:
        """Return how many runs have scores on other data of the same name only."""
        if (evaluation.data or "") not in self.fingerprints.evaluations:
            return 0
        stored = [read_json(file)["evaluations"] for cell in cells if (file := self.file(cell)).exists()]
        return sum(evaluation.key in entries and evaluation.key not in self._select(entries) for entries in stored)

    def count_several_data(self, cells: Iterable[Cell]) -> int:
        """Return how many runs have results on several data sets of the same name."""
        return sum(any((self.folder / "runs").glob(f"{cell.key}-*.json")) for cell in cells)

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """Return the result of a run, None if there is none."""
        file = self.file(cell)
        if not file.exists():
            return None
        try:
            result: dict[str, Any] = json.loads(file.read_bytes())
            StoredResult.model_validate(result)
        except (ValueError, RecursionError):
            raise UserError(f"{file} is not the result of a run; delete it, and the run is made again") from None
        result["evaluations"] = self._select(result["evaluations"])
        current = cell.identity["settings"]
        for path, value in parsing.current_names(cell.kind, result["settings"]).items():
            # a default that has changed since, which the key does not tell
            if path in current and current[path] != value:
                raise UserError(
                    f"{file} was made with {path}={value}, which is {current[path]} now; delete it or set {path} in "
                    "the study"
                )
        return result

    def _select(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scores on the current data, by the keys of evaluations; the first ones of unknown data."""
        selected: dict[str, Any] = {}
        for name, entry in entries.items():
            key, _, other = name.partition("-")
            fingerprint = self.fingerprints.evaluations.get(str(entry.get("data"))) if isinstance(entry, dict) else None
            if _is_of(entry, fingerprint) if fingerprint is not None else not other:
                selected[key] = entry
        return selected

    def missing_evaluations(self, cell: Cell, evaluations: Mapping[str, Evaluation]) -> list[Evaluation]:
        """Return the evaluations without scores of a run; all of them, also its training, if it was not trained."""
        result = self.read(cell)
        stored = {} if result is None else result["evaluations"]
        # two columns may be of one evaluation
        by_key = {one.key: one for one in evaluations.values() if not (cell.untrained and one.is_time)}
        for key, one in by_key.items():
            if key not in stored or one.name == TRAINING:
                continue
            current, built = one.score_settings(), stored[key].get("built", {})
            for name, value in parsing.current_names(one.settings_class, built).items():
                if name in current and current[name] != value:
                    raise UserError(
                        f"{self.file(cell)} has scores of {one.name} made with {name}={value}, which is "
                        f"{current[name]} now; delete them there or set {name} in the study"
                    )
        return [one for key, one in by_key.items() if result is None or (one.name != TRAINING and key not in stored)]

    def is_complete(self, study: Study, cell: Cell) -> bool:
        """Return whether a run has all its scores."""
        return not self.missing_evaluations(cell, study.outline.evaluations)


def _is_of(stored: Any, fingerprint: str | None) -> bool:
    """Return whether a result, or scores, are of data of a fingerprint, as far as both are known."""
    known = stored.get("fingerprint") if isinstance(stored, dict) else None
    return fingerprint is None or known is None or is_same(str(known), fingerprint)


def get_score(result: Mapping[str, Any] | None, evaluation: Evaluation) -> float | None:
    """Return the number of a column in a result, None if it is missing or not finite."""
    if result is None:
        return None
    if evaluation.name == TRAINING:
        number = result["training"].get("last", {}).get(evaluation.score)
    else:
        scores = result["evaluations"].get(evaluation.key, {}).get("scores", {})
        number = scores.get(evaluation.score)
        if scores and number is None and not evaluation.is_time:  # which has no minutes if it was not reached
            raise UserError(f"{evaluation.name} has no score '{evaluation.score}'; it has: {', '.join(sorted(scores))}")
    return float(number) if isinstance(number, int | float) and math.isfinite(number) else None


def write_training(
    file: Path, identity: Mapping[str, Any], run: Run, untrained: bool, fingerprint: str | None = None
) -> None:
    """Write the result of a run that has ended, on images of a fingerprint, still without scores."""
    starts = [] if untrained else [{name: start.get(name) for name in START_FIELDS} for start in run.starts()]
    last: dict[str, Any] = {}
    probes = []
    for row in run.rows("metrics.jsonl"):
        last |= {name: number for name, number in row.items() if isinstance(number, int | float)}
        if any(name in row for name in PROBE_FIELDS[1:]):
            probes.append({name: row[name] for name in PROBE_FIELDS if name in row})
    summary = read_json(run.path / "results.json") if run.finished else {}
    training = {
        "steps": summary.get("steps", 0),
        "epochs": summary.get("epochs", 0),
        "minutes": summary.get("seconds_training", 0.0) / 60,
        "images_per_second": summary.get("images_per_second"),
        "gib": summary.get("gpu_gib"),
        "seconds_to_first_step": summary.get("seconds_to_first_step"),
        "last": last,
        "probes": probes,
    }
    data = {} if fingerprint is None else {"fingerprint": fingerprint}
    write_json(file, {**identity, **data, "training": training, "evaluations": {}, "provenance": starts})


def add_scores(
    file: Path, evaluation: Evaluation, scores: Mapping[str, Any], seconds: float, fingerprint: str | None = None
) -> None:
    """Add the numbers of an evaluation, on data of a fingerprint, to a result; those of single classes are left out."""
    result = read_json(file)
    first = result["evaluations"].get(evaluation.key)
    same_data = first is None or _is_of(first, fingerprint)
    key = evaluation.key if same_data or fingerprint is None else f"{evaluation.key}-{shorten(fingerprint)}"
    result["evaluations"][key] = {
        "name": evaluation.name,
        "data": evaluation.data,
        **({} if fingerprint is None else {"fingerprint": fingerprint}),
        "recipe": evaluation.recipe,
        "settings": evaluation.settings,
        "built": evaluation.score_settings(),
        "scores": {name: number for name, number in scores.items() if isinstance(number, int | float)},
        "seconds": round(seconds, 1),
    }
    write_json(file, result)
