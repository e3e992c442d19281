"""The time that a training took until its kNN accuracy reached a value, start-up included. Imports no torch.

It is read from the files of the run: kNN is scored every few epochs during the training, and the time of that scoring
does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from pydantic import Field

from adclr.config.parsing import Count, Section
from adclr.system.runs import Run

NAME = "time_to_knn"
ACCURACY = "knn_top1"  # in metrics.jsonl
SCORES = ("minutes", "epochs", "best", "seconds_to_first_step")


class TimeSettings(Section):
    """Settings of the column."""

    at_least: float = Field(gt=0, le=100, description="kNN accuracy in percent that is to be reached")
    every_epochs: Count = Field(1, description="epochs between two scores")

    @property
    def probe(self) -> dict[str, Any]:
        """Return the settings of the training that it needs, but for the data."""
        return {"probe.every_epochs": self.every_epochs}


def is_timed(run: Run, data: str, every_epochs: int) -> bool:
    """Return whether a run has finished with all its kNN scores on this data."""
    settings = run.settings() if run.finished else None
    if settings is None or settings.probe.data != data or settings.probe.every_epochs != every_epochs:
        return False
    scored = {row.get("step") for row in run.rows("metrics.jsonl") if ACCURACY in row}
    return len(scored) >= settings.train.epochs // every_epochs + 1  # one before the first step


def measure(run: Run, settings: TimeSettings) -> dict[str, float]:
    """Return the minutes and epochs until the accuracy was reached, neither if it was not, and the best accuracy."""
    timing = list(run.rows("timing.jsonl"))
    probes = [row for row in run.rows("metrics.jsonl") if ACCURACY in row]
    scores = {"best": max(row[ACCURACY] for row in probes)}
    first_steps = [row["seconds_to_first_step"] for row in timing if "seconds_to_first_step" in row]
    if first_steps:
        scores["seconds_to_first_step"] = first_steps[0]
    reached = next((row for row in probes if row[ACCURACY] >= settings.at_least), None)
    if reached is not None:
        scores |= {"minutes": seconds_until(timing, reached["step"]) / 60, "epochs": reached["epoch"]}
    return scores


def seconds_until(timing: Iterable[Mapping[str, Any]], step: int) -> float:
    """Return the seconds from the command until a step was done, over all starts and without those of probes.

    A line of timing.jsonl has the seconds since the one before; between two of them steps take the same time.
    """
    first: Mapping[str, Any] = {"step": 0}
    seconds = 0.0
    for before, row in pairwise([first, *timing]):
        if before["step"] >= step and before is not first:
            break
        seconds += row.get("seconds_starting", 0.0)
        steps = row["step"] - before["step"]
        share = min(1.0, (step - before["step"]) / steps) if steps > 0 else 1.0
        seconds += share * row.get("seconds", 0.0)
    return seconds
