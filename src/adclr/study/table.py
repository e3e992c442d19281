"""Tables of a study: means over seeds, paired differences to the control, and the Markdown page that shows them.

A difference is taken seed by seed, since runs of one seed share their initial weights and the order of the images. Its
95 % interval is Student's; it says how far the seeds agree, not what other data would give.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from adclr.config.parsing import UserError
from adclr.study.results import Results, get_score
from adclr.study.study_file import SCENES, TRAINING, Cell, Evaluation, Study

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom, and one for more, which is near enough
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306),
    *(2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120),
)
T_QUANTILE_BEYOND = 2.1
START_UP = "start-up s"
COSTS = {
    "minutes": "minutes",
    START_UP: "seconds_to_first_step",
    "GiB": "gib",
    "images/s": "images_per_second",
}  # column: number of the training
MAX_NAMES = 6  # missing runs that are named
SOURCES = {"init": "starts from the weights of", "teacher": "learns from the weights of"}


@dataclass(frozen=True)
class Sample:
    """Scores of one kind of run, by seed."""

    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float | None:
        """Return the mean over seeds, None without seeds."""
        return mean(self.by_seed.values()) if self.by_seed else None

    @property
    def deviation(self) -> float | None:
        """Return the standard deviation over seeds, None for a single seed."""
        return stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None

    def minus(self, control: Sample) -> Sample:
        """Return the differences of the seeds that both have."""
        return Sample(
            {seed: score - control.by_seed[seed] for seed, score in self.by_seed.items() if seed in control.by_seed}
        )

    def half_width(self) -> float | None:
        """Return half the width of the 95 % interval of the mean, None for a single seed."""
        deviation = self.deviation
        if deviation is None:
            return None
        freedom = len(self.by_seed) - 1
        quantile = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else T_QUANTILE_BEYOND
        return quantile * deviation / math.sqrt(freedom + 1)


Rows = dict[str, dict[str, Sample]]  # by label, then by column


def collect_rows(study: Study, results: Results) -> Rows:
    """Return all scores there are, and what each kind of run cost."""
    columns = (*study.outline.evaluations, *COSTS)
    scores: dict[str, dict[str, dict[int, float]]] = {label: {name: {} for name in columns} for label in study.labels}
    metrics: dict[str, Any] = {}  # the last ones of all runs
    complete = True
    for cell in study.cells:
        row, result = scores[cell.label], results.read(cell)
        if result is None:
            complete = False
            continue
        for title, evaluation in study.outline.evaluations.items():
            score = get_score(result, evaluation)
            if score is not None:
                row[title][cell.seed] = score
        for name, key in COSTS.items():
            cost = result["training"].get(key)
            if isinstance(cost, int | float) and not cell.untrained:
                row[name][cell.seed] = float(cost)
        metrics |= result["training"].get("last", {})
    for evaluation in study.outline.evaluations.values():
        # unknown while runs are missing: those of DINO, say, have no number of queries
        if evaluation.name == TRAINING and complete and metrics and evaluation.score not in metrics:
            names = ", ".join(sorted(metrics))
            raise UserError(f"no run has written a number '{evaluation.score}'; there are: {names}")
    return {label: {name: Sample(by_seed) for name, by_seed in row.items()} for label, row in scores.items()}


def render_page(study: Study, results: Results, rows: Rows, figure: str | None) -> str:
    """Return the page in Markdown: question, scores, differences, and how all of it was made."""
    outline = study.outline
    parts = [f"# {outline.title}", outline.question] if outline.question else [f"# {outline.title}"]
    scored = {title for row in rows.values() for title in outline.evaluations if row[title].by_seed}
    evaluations = {title: one for title, one in outline.evaluations.items() if title in scored} or outline.evaluations
    parts += _describe_missing(study, results)
    costs = [name for name in COSTS if any(row[name].by_seed for row in rows.values())]
    body = []
    for label, row in rows.items():
        means = [_format_mean(row[title], one.digits) for title, one in evaluations.items()]
        means += [_format_mean(row[name], 0 if name == "images/s" else 1, deviation=False) for name in costs]
        seeds = max((len(row[title].by_seed) for title in evaluations), default=0)
        body.append([f"{label} (control)" if label == outline.control else label, *means, str(seeds)])
    parts.append(_format_table(["", *evaluations, *costs, "seeds"], body))
    if outline.control is not None and len(rows) > 1:
        parts.append(
            f"Difference to {outline.control}, seed by seed, with its 95 % interval where there are several seeds:"
        )
        control = rows[outline.control]
        body = [
            [label, *(_format_difference(row[title].minus(control[title]), one) for title, one in evaluations.items())]
            for label, row in rows.items()
            if label != outline.control
        ]
        parts.append(_format_table(["", *evaluations], body))
    if figure:
        parts.append(f"![{outline.title}]({figure})")
    parts.append(_describe_protocol(study, results, evaluations))
    return "\n\n".join(parts) + "\n"


def _describe_missing(study: Study, results: Results) -> list[str]:
    """Return which runs are missing, and which scores of the others."""
    missing = [cell for cell in study.cells if results.read(cell) is None]
    trained = [cell for cell in study.cells if results.read(cell) is not None]
    lines = []
    if missing:
        names = "; ".join(dict.fromkeys(map(_name_in_bold, missing[:MAX_NAMES])))
        more = "; ..." if len(missing) > MAX_NAMES else ""
        lines.append(f"**{len(missing)} of {len(study.cells)} runs are missing: {names}{more}.**")
    unscored = [{one.key for one in results.missing_evaluations(cell, study.outline.evaluations)} for cell in trained]
    counts = {title: sum(one.key in keys for keys in unscored) for title, one in study.outline.evaluations.items()}
    words = [f"{title} of {count} runs" for title, count in counts.items() if count]
    if words:
        lines.append(f"**Not scored yet: {', '.join(words)}.**")
    for title, one in study.outline.evaluations.items():
        scored = [cell for cell in trained if one.is_time and one.key in (results.read(cell) or {})["evaluations"]]
        late = [_name_in_bold(cell) for cell in scored if get_score(results.read(cell), one) is None]
        if late:
            lines.append(f"**Not reached: {title}, by {'; '.join(late)}.**")
    return lines


def _name_in_bold(cell: Cell) -> str:
    """Return the name of a run for a sentence in bold, which the asterisk of ADCLR* would end."""
    return f"{cell.label}, seed {cell.seed}".replace("*", r"\*")


def summarize(rows: Rows, control: str | None) -> dict[str, Any]:
    """Return the numbers of the page for programs."""
    summary: dict[str, dict[str, dict[str, Any]]] = {label: {} for label in rows}
    has_start_up = any(row[START_UP].by_seed for row in rows.values())  # earlier results have none
    for label, row in rows.items():
        for name, sample in row.items():
            if name == START_UP and not has_start_up:
                continue
            summary[label][name] = {
                "mean": sample.mean,
                "deviation": sample.deviation,
                "by_seed": dict(sample.by_seed),
            }
            if control is not None and label != control and name not in COSTS:
                difference = sample.minus(rows[control][name])
                summary[label][name]["difference"] = {
                    "mean": difference.mean,
                    "half_width": difference.half_width(),
                    "by_seed": difference.by_seed,
                }
    return summary


def _format_mean(sample: Sample, digits: int, deviation: bool = True) -> str:
    if sample.mean is None:
        return "–"
    shown = deviation and sample.deviation is not None
    return f"{sample.mean:.{digits}f}" + (f" ± {sample.deviation:.{digits}f}" if shown else "")


def _format_difference(sample: Sample, evaluation: Evaluation) -> str:
    if sample.mean is None:
        return "–"
    half = sample.half_width()

    def signed(number: float) -> str:
        return f"{round(number, evaluation.digits) + 0.0:+.{evaluation.digits}f}"  # no -0.0

    if half is None:
        return signed(sample.mean)
    return f"{signed(sample.mean)} [{signed(sample.mean - half)}, {signed(sample.mean + half)}]"


def _format_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _describe_protocol(study: Study, results: Results, evaluations: Mapping[str, Evaluation]) -> str:
    """Return data, settings, seeds, machines, commits, and the command."""
    outline = study.outline
    lines = [
        f"Data: {outline.data}. Recipe: {outline.recipe}"
        + (f", with {', '.join(f'{k}={v}' for k, v in outline.settings.items())}" if outline.settings else "")
        + f". Seeds: {', '.join(map(str, outline.seeds))}."
    ]
    for arm, cell in {cell.arm: cell for cell in study.cells}.items():
        facts = [f"trained on {cell.data}"] if cell.data != outline.data else []
        if cell.source is not None:
            facts.append(f"{SOURCES[cell.source_name]} {cell.source.arm}")
        if facts:
            lines.append(f"{arm}: {', '.join(facts)}, recipe {cell.recipe}.")
    for title, one in evaluations.items():
        if one.is_time:
            settings = one.build("", "")
            lines.append(
                f"{title}: `{one.score}` until kNN on {one.data}, scored every {settings.every_epochs} epochs, is at "
                f"least {settings.at_least:g} %. Minutes count from the command, without the time of these scores."
            )
        elif one.data is not None:
            changes = ([f"recipe {one.recipe}"] if one.recipe else []) + [f"{k}={v}" for k, v in one.settings.items()]
            changed = f" with {', '.join(changes)}" if changes else ""
            lines.append(f"{title}: `{one.score}` of `adclr evaluate {one.name}` on {one.data}{changed}.")
        else:
            lines.append(f"{title}: the last `{one.score}` of the run's own metrics.")
    for name, figure in outline.pictures.items():
        folder = f"pictures/{name} of each run's folder in --out"
        lines.append(f"Pictures: `adclr visualize {figure.name}` of {figure.data}, in {folder}.")
    starts = [start for cell in study.cells for start in (results.read(cell) or {}).get("provenance", [])]
    devices = sorted({str(start.get("device")) for start in starts})
    known = {str(commit) for start in starts if (commit := start.get("commit"))}  # none where there was no git
    commits = sorted(f"{commit[:7]}{'+' * commit.endswith('+')}" for commit in known)
    days = sorted({str(start.get("started"))[:10] for start in starts})
    if starts:
        lines.append(
            f"Trained on {', '.join(devices)}; {days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}; "
            f"commit {', '.join(commits) or 'not recorded'}. Settings of each run: `runs/KEY.json` beside this page."
        )
        lines.append("Minutes and images/s are those of each run, alone on its GPU or beside others.")
    folders = "".join(f" {name}=DIR" for name in sorted(study.data_names() - {SCENES}))
    lines.append(f"Command: `adclr study {shlex.quote(_relative_path(study.file))}{folders}`")
    return "  \n".join(lines)


def _relative_path(file: Path) -> str:
    """Return the path as seen from the folder above."""
    return str(Path(file.parent.name) / file.name) if file.parent.name else file.name
