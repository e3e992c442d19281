"""Studies for tests: their files, and results of runs that were not made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adclr.study.results import Results
from adclr.study.study_file import Study, read_study

KNN = {"name": "knn", "data": "photos", "score": "knn_top1_k3", "settings": {"k": [3], "device": "cpu"}}
SMALL = {"title": "A study", "data": "photos/train", "recipe": "demo", "evaluations": {"kNN": KNN}}


def study(folder: Path, name: str = "one.yaml", **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(SMALL | changes))  # which is YAML too
    return folder / name


def store_results(folder: Path, file: Path, scores: dict[tuple[str, int], float]) -> tuple[Study, Results]:
    """A study of which these runs are done, by label and seed."""
    study, results = read_study(file), Results(folder)
    for cell in study.cells:
        if (cell.label, cell.seed) in scores:
            score = {"knn_top1_k3": scores[cell.label, cell.seed], "knn_train": 5}
            training = {"minutes": 2.0, "gib": 3.5, "images_per_second": 100.0, "last": {"rank_cls": 7.0}}
            evaluations = {one.key: {"scores": score} for one in study.outline.evaluations.values()}
            text = {**cell.identity, "training": training, "evaluations": evaluations, "provenance": []}
            results.file(cell).parent.mkdir(parents=True, exist_ok=True)
            results.file(cell).write_text(json.dumps(text))
    return study, results
