"""What studies would run and cost: the list of shipped studies, and the runs of one, without their data."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adclr.config.parsing import UserError
from adclr.study import cost, shipped
from adclr.study.jobs import select_runs
from adclr.study.results import Results
from adclr.study.study_file import SCENES, Cell, Study, read_study
from adclr.system.text import printable
from adclr.training.plan_gpus import Gpu

UNKNOWN = "?"
BASIS = (
    "ESTIMATED for one {name} of {gib:.0f} GiB: training by the step that `adclr plan --gpu` estimates, evaluations\n"
    "in proportion to what was measured on one H200; without start-up, and as if images were never waited for.\n"
    "`?`: not estimated, since its recipe is for a CPU, or the study does not name the number of images."
)


@dataclass(frozen=True)
class RunState:
    """A run, what it would cost, and which of its scores there are."""

    cell: Cell
    cost: cost.CellCost
    result: Mapping[str, Any] | None
    missing: tuple[str, ...]  # titles of evaluations without scores

    @property
    def state(self) -> str:
        """Return what there is of it, in words."""
        if not self.missing:
            return "done"
        return "missing" if self.result is None else "not scored" if self.cell.untrained else "trained, not scored"

    @property
    def training_left(self) -> float | None:
        """Return the hours of training that are still to come, if the weights of trained runs are at hand."""
        return 0.0 if self.result is not None else self.cost.training

    @property
    def evaluations_left(self) -> float | None:
        """Return the hours of evaluations that are still to come; None where one of them is not estimated."""
        return _sum(self.cost.evaluations.get(title) for title in self.missing if title in self.cost.evaluations)


@dataclass(frozen=True)
class Overview:
    """A study and the state of its runs."""

    study: Study
    runs: Sequence[RunState]

    @property
    def hours(self) -> float | None:
        """Return the hours of everything."""
        return _sum(hours for run in self.runs for hours in (run.cost.training, *run.cost.evaluations.values()))

    @property
    def left(self) -> float | None:
        """Return the hours of what is missing."""
        return _sum(hours for run in self.runs for hours in (run.training_left, run.evaluations_left))

    @property
    def done(self) -> int:
        """Return the number of runs with all scores."""
        return sum(not run.missing for run in self.runs)


def _sum(hours: Any) -> float | None:
    """Return the sum; None if a summand is None."""
    values = list(hours)
    return None if any(value is None for value in values) else float(sum(values))


def find_small(file: Path) -> Path:
    """Return the small variant of a study, a file beside it: a name again if it is a shipped one."""
    path, is_shipped = shipped.find_study(file)
    small = read_study(path).outline.small
    if small is None:
        raise UserError(f"study {file} names no small variant; leave out --small")
    return Path(small) if is_shipped else path.with_name(f"{small}.yaml")


def inspect_study(file: Path, gpu: Gpu, results: Path | None = None, only: Sequence[str] = ()) -> Overview:
    """Return the runs of a study with their state and cost, those with some of these words; its data is not read."""
    path, is_shipped = shipped.find_study(file)
    study = read_study(path)
    if results is None:  # shipped studies that were run here have their results here, beside the shipped ones
        is_here = is_shipped and (shipped.WORKING_RESULTS / f"{path.stem}.md").exists()
        results = shipped.WORKING_RESULTS if is_here else path.parent / "results"
    store = Results(results)
    runs = []
    for cell in select_runs(study.cells, only):
        keys = {one.key for one in store.missing_evaluations(cell, study.outline.evaluations)}
        missing = tuple(title for title, one in study.outline.evaluations.items() if one.key in keys)
        runs.append(RunState(cell, cost.estimate_cell(study, cell, gpu), store.read(cell), missing))
    return Overview(study, runs)


def list_studies(gpu: Gpu, results: Path | None = None) -> str:
    """Return a table of all shipped studies: runs, those that are done, hours, the small study of each, title."""
    rows = [("study", "runs", "done", "partly", "hours", "left", "small variant", "title")]
    for name in shipped.shipped_names():
        overview = inspect_study(Path(name), gpu, results)
        outline = overview.study.outline
        hours = _format_hours(overview.hours), _format_hours(overview.left)
        partly = sum(run.state == "trained, not scored" for run in overview.runs)
        counts = str(len(overview.runs)), str(overview.done), str(partly)
        rows.append((name, *counts, *hours, outline.small or "", printable(outline.title)))
    notes = [
        BASIS.format(name=gpu.name, gib=gpu.gib),
        "`done`: runs with all scores of the study; `partly`: trained runs of which some are missing.",
        "`adclr study NAME --dry-run` names the runs of a study, `--small` takes its small variant.",
    ]
    return "\n".join([*_align(rows, right=range(1, 6)), "", *notes])


def describe_study(overview: Overview, gpu: Gpu, file: Path) -> str:
    """Return the runs of a study, its evaluations, what both would cost, and the command with the file as named."""
    study, outline = overview.study, overview.study.outline
    rows = [("run", "state", "training", "evaluations")]
    for run in overview.runs:
        training = "–" if run.cell.untrained else _format_hours(run.cost.training)
        scores = _format_hours(_sum(run.cost.evaluations.values()))
        rows.append((printable(f"{run.cell.label}, seed {run.cell.seed}"), run.state, training, scores))
    lines = [f"{printable(outline.title)}: {len(overview.runs)} runs, {overview.done} of them done", ""]
    lines += _align(rows, right=range(2, 4))
    lines += ["", *_align(_evaluation_rows(overview), right=range(4, 5)), ""]
    counts = [f"{name} ({_count(study, name)})" for name in sorted(study.data_names())]
    lines.append(f"data: {', '.join(counts)}")
    lines.append(f"all of it: {_format_hours(overview.hours)}; what is missing: {_format_hours(overview.left)}")
    trained = [run for run in overview.runs if run.state == "trained, not scored"]
    if trained:
        lines.append(
            f"trained, not scored: {len(trained)}; without their weights in --out they are trained again, "
            f"{_format_hours(_sum(run.cost.training for run in trained))} more"
        )
    if outline.small:
        lines.append(f"small variant: {outline.small}, with the same question for small data; --small takes it")
    return "\n".join([*lines, BASIS.format(name=gpu.name, gib=gpu.gib), f"run it: {_command(file, study)}"])


def _command(file: Path, study: Study) -> str:
    folders = "".join(f" {name}=DIR" for name in sorted(study.data_names() - {SCENES}))
    return printable(f"adclr study {shlex.quote(str(file))}{folders}")


def _evaluation_rows(overview: Overview) -> list[tuple[str, ...]]:
    """Return a row for each column of the study: what scores it, on which data, and the hours of one run."""
    rows: list[tuple[str, ...]] = [("evaluation", "by", "score", "data", "a run")]
    for title, one in overview.study.outline.evaluations.items():
        by = one.recipe or one.name
        estimate = None if one.data is None else overview.runs[0].cost.evaluations[title]
        hours = "with the above" if estimate == 0 else "–" if one.data is None else _format_hours(estimate)
        rows.append((printable(title), by, one.score, one.data or "–", hours))
    return rows


def _count(study: Study, name: str) -> str:
    count = cost.count_images(study, name)
    return "built in" if name == SCENES else f"{count} training images" if count else "number not known"


def _format_hours(hours: float | None) -> str:
    """Return hours on one GPU: 4 min, 1.5 h, 320 h."""
    if hours is None:
        return UNKNOWN
    if hours < 1:
        return f"{60 * hours:.{0 if hours >= 1 / 6 else 1}f} min" if hours else "0"
    return f"{hours:.{0 if hours >= 10 else 1}f} h"


def _align(rows: Sequence[Sequence[str]], right: range) -> list[str]:
    """Return rows as aligned text; these columns are aligned on the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
