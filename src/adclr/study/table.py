"""Numbers of a study: means over seeds, paired differences to the control, and the page that shows them.

A difference is taken seed by seed, since runs of one seed share their initial weights and the order of the images. Its
interval is Student's, of 95 %; it tells how far the seeds agree, not what other data would give.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from adclr.config.sections import UserError
from adclr.study.outline import TRAINING, Evaluation, Study
from adclr.study.results import Results, value

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond them the normal one is near enough
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)
T_LATER = 2.1
COSTS = ("minutes", "GiB", "images/s")


@dataclass(frozen=True)
class Sample:
    """A score of one kind of run, by seed."""

    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float | None:
        return mean(self.by_seed.values()) if self.by_seed else None

    @property
    def deviation(self) -> float | None:
        """Over seeds; None of one."""
        return stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None

    def minus(self, control: Sample) -> Sample:
        """Seed by seed, where both have one."""
        return Sample(
            {seed: own - control.by_seed[seed] for seed, own in self.by_seed.items() if seed in control.by_seed}
        )

    def half_width(self) -> float | None:
        """Of the 95 % interval of the mean; None of one seed."""
        spread = self.deviation
        if spread is None:
            return None
        freedom = len(self.by_seed) - 1
        return (T[freedom - 1] if freedom <= len(T) else T_LATER) * spread / math.sqrt(freedom + 1)


Rows = dict[str, dict[str, Sample]]  # by label, then by column


def collect(study: Study, results: Results) -> Rows:
    """All scores there are, and what each kind of run cost."""
    columns = (*study.outline.evaluations, *COSTS)
    found: dict[str, dict[str, dict[int, float]]] = {label: {name: {} for name in columns} for label in study.labels}
    written: dict[str, Any] = {}  # by any run, of its training
    whole = True
    for cell in study.cells:
        row, kept = found[cell.label], results.of(cell)
        whole &= kept is not None
        for title, evaluation in study.outline.evaluations.items():
            number = value(kept, evaluation)
            if number is not None:
                row[title][cell.seed] = number
        if kept is not None and not cell.untrained:
            costs = (kept["training"].get(name) for name in ("minutes", "gib", "images_per_second"))
            for name, number in zip(COSTS, costs, strict=True):
                if isinstance(number, int | float):
                    row[name][cell.seed] = float(number)
        written |= {} if kept is None else kept["training"].get("last", {})
    for evaluation in study.outline.evaluations.values():
        # of some runs alone it could not be said: DINO has no number of queries
        if evaluation.name == TRAINING and whole and written and evaluation.score not in written:
            names = ", ".join(sorted(written))
            raise UserError(f"no run has written a number '{evaluation.score}'; there are: {names}")
    return {label: {name: Sample(numbers) for name, numbers in row.items()} for label, row in found.items()}


def page(study: Study, results: Results, rows: Rows, figure: str | None) -> str:
    """Markdown: what was asked, the scores, the differences, and how all of it was made."""
    outline = study.outline
    parts = [f"# {outline.title}", outline.question] if outline.question else [f"# {outline.title}"]
    seen = {title for row in rows.values() for title in outline.evaluations if row[title].by_seed}
    evaluations = {title: one for title, one in outline.evaluations.items() if title in seen} or outline.evaluations
    parts += _missing(study, results)
    costs = [name for name in COSTS if any(row[name].by_seed for row in rows.values())]
    head = ["", *evaluations, *costs, "seeds"]
    body = []
    for label, row in rows.items():
        scores = [_mean(row[title], one.digits) for title, one in evaluations.items()]
        spent = [_mean(row[name], 0 if name == "images/s" else 1, deviation=False) for name in costs]
        seeds = max((len(row[title].by_seed) for title in evaluations), default=0)
        body.append([f"{label} (control)" if label == outline.control else label, *scores, *spent, str(seeds)])
    parts.append(_table(head, body))
    if outline.control is not None and len(rows) > 1:
        parts.append(f"Difference to {outline.control}, seed by seed, with its 95 % interval where there are several:")
        control = rows[outline.control]
        body = [
            [label, *(_difference(row[title].minus(control[title]), one) for title, one in evaluations.items())]
            for label, row in rows.items()
            if label != outline.control
        ]
        parts.append(_table(["", *evaluations], body))
    if figure:
        parts.append(f"![{outline.title}]({figure})")
    parts.append(_protocol(study, results, evaluations))
    return "\n\n".join(parts) + "\n"


def _missing(study: Study, results: Results) -> list[str]:
    """Which runs there are not, and which scores of those there are."""
    missing = [cell for cell in study.cells if results.of(cell) is None]
    there = [cell for cell in study.cells if results.of(cell) is not None]
    lines = []
    if missing:
        names = "; ".join(dict.fromkeys(f"{cell.label}, seed {cell.seed}" for cell in missing[:6]))
        more = "; ..." if len(missing) > 6 else ""
        lines.append(f"**{len(missing)} of {len(study.cells)} runs are missing: {names}{more}.**")
    unscored = [{one.key for one in results.missing(cell, study.outline.evaluations)} for cell in there]
    counts = {title: sum(one.key in keys for keys in unscored) for title, one in study.outline.evaluations.items()}
    words = [f"{title} of {count} runs" for title, count in counts.items() if count]
    if words:
        lines.append(f"**Not scored yet: {', '.join(words)}.**")
    return lines


def numbers(rows: Rows, control: str | None) -> dict[str, Any]:
    """The same for programs."""
    found: dict[str, Any] = {}
    for label, row in rows.items():
        found[label] = {}
        for name, sample in row.items():
            entry: dict[str, Any] = {
                "mean": sample.mean,
                "deviation": sample.deviation,
                "by_seed": dict(sample.by_seed),
            }
            if control is not None and label != control and name not in COSTS:
                apart = sample.minus(rows[control][name])
                entry["difference"] = {"mean": apart.mean, "half_width": apart.half_width(), "by_seed": apart.by_seed}
            found[label][name] = entry
    return found


def _mean(sample: Sample, digits: int, deviation: bool = True) -> str:
    if sample.mean is None:
        return "–"
    spread = sample.deviation
    return f"{sample.mean:.{digits}f}" + (f" ± {spread:.{digits}f}" if deviation and spread is not None else "")


def _difference(sample: Sample, evaluation: Evaluation) -> str:
    if sample.mean is None:
        return "–"
    half = sample.half_width()

    def signed(number: float) -> str:
        return f"{round(number, evaluation.digits) + 0.0:+.{evaluation.digits}f}"  # no -0.0

    if half is None:
        return signed(sample.mean)
    return f"{signed(sample.mean)} [{signed(sample.mean - half)}, {signed(sample.mean + half)}]"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _protocol(study: Study, results: Results, evaluations: Mapping[str, Evaluation]) -> str:
    """Data, settings, seeds, machines, commits, and the command."""
    outline = study.outline
    lines = [
        f"Data: {outline.data}. Recipe: {outline.recipe}"
        + (f", with {', '.join(f'{k}={v}' for k, v in outline.settings.items())}" if outline.settings else "")
        + f". Seeds: {', '.join(map(str, outline.seeds))}."
    ]
    for title, one in evaluations.items():
        if one.data is not None:
            said = ([f"recipe {one.recipe}"] if one.recipe else []) + [f"{k}={v}" for k, v in one.settings.items()]
            changed = f" with {', '.join(said)}" if said else ""
            lines.append(f"{title}: `{one.score}` of `adclr evaluate {one.name}` on {one.data}{changed}.")
        else:
            lines.append(f"{title}: the last `{one.score}` of the run's own metrics.")
    starts = [start for cell in study.cells for start in (results.of(cell) or {}).get("provenance", [])]
    devices = sorted({str(start.get("device")) for start in starts})
    known = {str(commit) for start in starts if (commit := start.get("commit"))}  # none where there was no git
    commits = sorted(f"{commit[:7]}{'+' * commit.endswith('+')}" for commit in known)
    days = sorted({str(start.get("started"))[:10] for start in starts})
    if starts:
        lines.append(
            f"Trained on {', '.join(devices)}; {days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}; "
            f"commit {', '.join(commits) or 'not recorded'}. What each run was told: `runs/KEY.json` beside this page."
        )
        lines.append("Minutes and images/s are of each run as it was made, be it alone on its GPU or beside others.")
    names = sorted(study.data_names() - {"scenes"})
    lines.append(f"Command: `adclr study {shlex.quote(_short(study.file))}{''.join(f' {name}=DIR' for name in names)}`")
    return "  \n".join(lines)


def _short(file: Path) -> str:
    """As it would be written from the folder above."""
    return str(Path(file.parent.name) / file.name) if file.parent.name else file.name
