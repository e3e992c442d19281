"""The runs of a study as jobs: what is missing of each, its description for a worker, and how far it is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adclr.config.parsing import UserError
from adclr.study.results import Results, get_score
from adclr.study.study_file import Cell, Evaluation, Picture, Study, data_name, data_path
from adclr.system.text import printable


@dataclass(frozen=True)
class Workspace:
    """Folders of runs and data, and the GPUs."""

    out: Path  # a folder for each run, and jobs/ with the job and the log of each
    folders: Mapping[str, Path]  # of data sets, by name
    gpus: Sequence[str | None] = ()  # CUDA_VISIBLE_DEVICES of each run at once on this machine

    def has_weights(self, cell: Cell, results: Results) -> bool:
        """Return whether the weights of a run are here."""
        return (self.out / results.run_name(cell) / "backbone.safetensors").exists()

    def pictures(self, cell: Cell, results: Results) -> Path:
        """Return the folder of the pictures of a run."""
        return self.out / results.run_name(cell) / "pictures"

    def job_file(self, cell: Cell, results: Results) -> Path:
        """Return the file of the job of a run."""
        return self.out / "jobs" / f"{results.run_name(cell)}.json"

    def log_file(self, cell: Cell, results: Results) -> Path:
        """Return the file with the output of a run."""
        return self.job_file(cell, results).with_suffix(".log")


def pending_evaluations(study: Study, cell: Cell, results: Results, workspace: Workspace) -> list[Evaluation] | None:
    """Return the missing evaluations whose data is here; None if neither they nor a training can be done."""
    result = results.read(cell)
    has_weights = cell.untrained or (result is not None and workspace.has_weights(cell, results))
    can_train = not cell.untrained and _can_train(cell, results, workspace)
    if not has_weights and not can_train:
        return None
    pending = [
        one
        for one in results.missing_evaluations(cell, study.outline.evaluations)
        if one.data is not None and data_name(one.data) in workspace.folders and (can_train or not one.is_time)
    ]
    return pending if pending or (result is None and not cell.untrained) else None


def _can_train(cell: Cell, results: Results, workspace: Workspace) -> bool:
    """Return whether the images of a run are here, and the weights that it needs, or their images."""
    if cell.untrained:
        return True
    source = cell.source
    has_source = source is None or workspace.has_weights(source, results) or _can_train(source, results, workspace)
    return has_source and data_name(cell.data) in workspace.folders


def with_sources(cells: Sequence[Cell], results: Results, workspace: Workspace) -> list[Cell]:
    """Return cells and, before each that will be trained, the run whose weights it needs if these are not here."""
    ordered: dict[str, Cell] = {}

    def add(cell: Cell) -> None:
        if cell.key in ordered:
            return
        source = cell.source
        if source is not None and not any(workspace.has_weights(one, results) for one in (cell, source)):
            add(source)
        ordered[cell.key] = cell

    for cell in cells:
        add(cell)
    return list(ordered.values())


def pending_pictures(study: Study, cell: Cell, results: Results, workspace: Workspace) -> dict[str, Picture]:
    """Return the pictures that are not drawn yet, by name, whose images are here; without weights here, none."""
    if not (cell.untrained or workspace.has_weights(cell, results)):
        return {}
    folder = workspace.pictures(cell, results)
    return {
        name: figure
        for name, figure in study.outline.pictures.items()
        if data_name(figure.data) in workspace.folders and not (folder / name / f"{figure.name}.json").exists()
    }


def is_done(study: Study, cell: Cell, results: Results, workspace: Workspace) -> bool:
    """Return whether a run has its weights here, and all scores and pictures whose data is here."""
    return (
        workspace.has_weights(cell, results)
        and pending_evaluations(study, cell, results, workspace) is None
        and not pending_pictures(study, cell, results, workspace)
    )


def in_rounds(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Return cells in groups, each of which needs weights of the groups before it at most."""
    rounds: list[list[Cell]] = []
    number: dict[str, int] = {}  # of the group of a run, by key; sources come before the runs that need them
    for cell in cells:
        after = number.get(cell.source.key, -1) if cell.source is not None else -1
        number[cell.key] = after + 1
        if len(rounds) == after + 1:
            rounds.append([])
        rounds[after + 1].append(cell)
    return rounds


def build_job(study: Study, cell: Cell, results: Results, workspace: Workspace) -> dict[str, Any]:
    """Return the job of a run, which `worker.run_job` does."""
    data, folders = cell.data, workspace.folders
    overrides = dict(cell.overrides)
    if cell.source is not None:
        weights = str((workspace.out / results.run_name(cell.source)).absolute())
        overrides["distill.teacher" if cell.source_name == "teacher" else "model.init"] = weights
    pictures = workspace.pictures(cell, results).absolute()
    evaluations = pending_evaluations(study, cell, results, workspace) or []
    timed = next((one for one in evaluations if one.is_time), None)
    probe = {}
    if timed is not None and timed.data is not None:
        probe = {"probe.data": data_path(timed.data, folders), **timed.build("", "").probe}
    return {
        "run": str((workspace.out / results.run_name(cell)).absolute()),
        "result": str(results.file(cell).absolute()),
        "data": data_path(data, folders) if data_name(data) in folders else None,
        "fingerprint": results.fingerprint(cell),
        "command": cell.settings.command,
        "recipe": cell.recipe,
        "overrides": overrides,
        "identity": cell.identity,
        "untrained": cell.untrained,
        "probe": probe,  # settings with which the time to an accuracy is measured
        "evaluations": [
            {
                "evaluation": one.model_dump(mode="json"),
                "data": data_path(one.data, folders),
                "fingerprint": results.fingerprints.evaluations.get(one.data),
            }
            for one in evaluations
            if one.data is not None
        ],
        "pictures": [
            {"figure": one.model_dump(mode="json"), "data": data_path(one.data, folders), "out": str(pictures / name)}
            for name, one in study.outline.pictures.items()
            if data_name(one.data) in folders and not (pictures / name / f"{one.name}.json").exists()
        ],
    }


def run_title(cell: Cell) -> str:
    """Return what a run is called in messages."""
    return f"{cell.label}, seed {cell.seed}"


def select_runs(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Return the runs that have some of these words in their title, all if there are no words."""
    selected = [cell for cell in cells if not only or any(words in run_title(cell) for words in only)]
    if not selected:
        titles = "; ".join(run_title(cell) for cell in cells)
        raise UserError(f"no run has '{only[0]}' in its name; there are: {printable(titles)}")
    return selected


def describe_progress(cell: Cell, results: Results, workspace: Workspace) -> str:
    """Return how far a run is: the last epoch of its metrics, the last line of its log once there are weights."""
    if cell.untrained or workspace.has_weights(cell, results):
        return f"{run_title(cell)}: {last_line(workspace.log_file(cell, results))[:60]}"
    last = re.search(r'"epoch": ([0-9.]+)', last_line(workspace.out / results.run_name(cell) / "metrics.jsonl"))
    epoch = float(last[1]) if last else 0.0
    return f"{run_title(cell)}: epoch {epoch:.0f} of {cell.settings.train.epochs}"


def format_scores(study: Study, cell: Cell, results: Results) -> str:
    """Return the scores of a run in one line."""
    result = results.read(cell)
    scores = [(title, get_score(result, one), one.digits) for title, one in study.outline.evaluations.items()]
    return ", ".join(f"{title} {score:.{digits}f}" for title, score, digits in scores if score is not None)


def last_line(path: Path) -> str:
    """Return the last line of a file that is not empty."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 4096))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
