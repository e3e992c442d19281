"""What is kept of every run: RESULTS/runs/KEY.json, small enough to be committed. Knows nothing of torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from adclr.config import sections
from adclr.config.sections import UserError
from adclr.config.settings import Settings
from adclr.study.data import Fingerprints
from adclr.study.outline import TRAINING, Cell, Evaluation, Study
from adclr.system.files import read_json, write_json
from adclr.system.runs import Run

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
    """What is known of the runs of a study, on data of these fingerprints.

    A result is kept with the fingerprints of its data. On other data of the same name it is not taken, and new ones are
    kept beside it: RESULTS/runs/KEY-FINGERPRINT.json, and in a file evaluations by KEY-FINGERPRINT. Results that say
    nothing of their data, of version 0.1, are taken as they are.
    """

    def __init__(self, folder: Path, data: Fingerprints | None = None) -> None:
        self.folder, self.data = folder, data or Fingerprints()

    def name(self, cell: Cell) -> str:
        """By which a run is called here: its key, or, if that is of other data, with the fingerprint behind it."""
        wanted = self._wanted(cell)
        if wanted is None:
            return cell.key
        own = f"{cell.key}-{short(wanted)}"
        return own if self._named(own).exists() or self._is_of_other_data(cell) else cell.key

    def _wanted(self, cell: Cell) -> str | None:
        """The fingerprint of the images at hand, if a run hangs on them."""
        return None if cell.untrained else self.data.training

    def _named(self, name: str) -> Path:
        return self.folder / "runs" / f"{name}.json"

    def file(self, cell: Cell) -> Path:
        return self._named(self.name(cell))

    def _is_of_other_data(self, cell: Cell) -> bool:
        """Whether the first result of a run is of other images than those at hand."""
        try:
            return not _fits(json.loads(self._named(cell.key).read_bytes()), self._wanted(cell))
        except (OSError, ValueError, RecursionError):  # not there, or damaged, which `of` says
            return False

    def of_other_data(self, cells: Iterable[Cell]) -> int:
        """Returns how many runs are known on other images of the same name alone."""
        return sum(self._is_of_other_data(cell) and not self.file(cell).exists() for cell in cells)

    def scores_of_other_data(self, cells: Iterable[Cell], evaluation: Evaluation) -> int:
        """Returns how many runs are scored on other data of the same name alone."""
        wanted = self.data.evaluations.get(evaluation.data or "")
        files = [self.file(cell) for cell in cells]
        stored = [read_json(file)["evaluations"] for file in files if file.exists()] if wanted is not None else []
        return sum(
            evaluation.key in entries and evaluation.key not in _taken(entries, self.data.evaluations)
            for entries in stored
        )

    def on_several_data(self, cells: Iterable[Cell]) -> int:
        """Returns how many runs have results on other data too."""
        return sum(any((self.folder / "runs").glob(f"{cell.key}-*.json")) for cell in cells)

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
        found["evaluations"] = _taken(found["evaluations"], self.data.evaluations)
        wanted = cell.known_by["settings"]
        for path, value in sections.current_names(Settings, found["settings"]).items():
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
            if key not in scored or one.name == TRAINING:
                continue
            built, stored = one.computed(), scored[key].get("built", {})
            for name, value in sections.current_names(one.settings_class, stored).items():
                if name in built and built[name] != value:
                    raise UserError(
                        f"{self.file(cell)} has scores of {one.name} made with {name}={value}, which is {built[name]} "
                        f"now; delete them there or set {name} in the study"
                    )
        return [one for key, one in wanted.items() if found is None or (one.name != TRAINING and key not in scored)]

    def complete(self, study: Study, cell: Cell) -> bool:
        return not self.missing(cell, study.outline.evaluations)


def short(fingerprint: str) -> str:
    return fingerprint[:8]


def _fits(stored: Any, wanted: str | None) -> bool:
    """Whether a result, or a score, is of the data at hand, as far as either is known."""
    known = stored.get("fingerprint") if isinstance(stored, dict) else None
    return wanted is None or known is None or known == wanted


def _taken(entries: Mapping[str, Any], data: Mapping[str, str]) -> dict[str, Any]:
    """The scores of the data at hand, by the keys of evaluations; of data that is not at hand the first ones."""
    taken: dict[str, Any] = {}
    for name, entry in entries.items():
        key, _, other = name.partition("-")
        wanted = data.get(str(entry.get("data"))) if isinstance(entry, dict) else None
        if _fits(entry, wanted) if wanted is not None else not other:
            taken[key] = entry
    return taken


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


def keep_training(
    file: Path, known_by: Mapping[str, Any], run: Run, untrained: bool, fingerprint: str | None = None
) -> None:
    """Begins the result of a run that has ended, on images of a fingerprint."""
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
    data = {} if fingerprint is None else {"fingerprint": fingerprint}
    write_json(file, {**known_by, **data, "training": training, "evaluations": {}, "provenance": starts})


def keep_scores(
    file: Path, evaluation: Evaluation, scores: Mapping[str, Any], seconds: float, fingerprint: str | None = None
) -> None:
    """Adds the numbers of an evaluation, on data of a fingerprint, without those of every class."""
    found = read_json(file)
    first = found["evaluations"].get(evaluation.key)
    fits = first is None or _fits(first, fingerprint)
    key = evaluation.key if fits or fingerprint is None else f"{evaluation.key}-{short(fingerprint)}"
    numbers = {name: number for name, number in scores.items() if isinstance(number, int | float)}
    found["evaluations"][key] = {
        "name": evaluation.name,
        "data": evaluation.data,
        **({} if fingerprint is None else {"fingerprint": fingerprint}),
        "recipe": evaluation.recipe,
        "settings": evaluation.settings,
        "built": evaluation.computed(),
        "scores": numbers,
        "seconds": round(seconds, 1),
    }
    write_json(file, found)
