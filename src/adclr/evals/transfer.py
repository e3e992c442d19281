"""Transfer: the linear probe, the fine-tuning or both on several labeled data sets, and a table of their scores.

The scores of each are written to PREFIX/DATA-HOW.json; the same command again computes only those that are missing, or
whose weights, images or settings have changed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from adclr.config.parsing import Several, UserError, setting
from adclr.data import file_stamps
from adclr.data.sets.classes import open_labeled
from adclr.data.sets.public import KINDS
from adclr.evals import finetune, linear
from adclr.evals.finetune import FinetuneSettings
from adclr.evals.linear import LinearSettings
from adclr.evals.task import EvaluationSettings, load_backbone
from adclr.system import distributed, outputs
from adclr.system.devices import select_device
from adclr.system.files import read_json, write_json
from adclr.system.text import printable


class Settings(EvaluationSettings):
    """Settings of `evaluate transfer`."""

    data: Several[str] = setting((), "labeled folders, or KIND:DIR; see linear", free=["study"])
    how: Several[Literal["linear", "finetune"]] = Field(
        ("linear",), min_length=1, description="what to train on each data set"
    )
    linear: LinearSettings = LinearSettings()
    finetune: FinetuneSettings = FinetuneSettings()


def run(settings: Settings, prefix: Path | None = None) -> dict[str, Any]:
    """Evaluate on all data sets and return the scores."""
    if not settings.weights or not settings.data:
        raise UserError("transfer needs weights and labeled data; give --weights and --data")
    names = _names(settings.data)
    # all data sets are opened before anything is trained, so that a mistake in the last costs nothing
    data_sets = {name: open_labeled(data) for name, data in zip(names, settings.data, strict=True)}
    start = load_backbone(settings, select_device(settings.device)).fingerprint()
    scores: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name, data in zip(names, settings.data, strict=True):
        labeled = data_sets[name]
        row: dict[str, Any] = {"data": name, "classes": len(labeled.classes), "train": len(labeled.train.labels)}
        row["val"] = len(labeled.val.labels)
        images = [file_stamps.fingerprint_files(split.source) for split in (labeled.train, labeled.val)]
        for how in dict.fromkeys(settings.how):
            chosen = _settings_for(settings, how, data)
            identity = {"settings": chosen.model_dump(mode="json"), "start": start, "images": images}
            result = _evaluate(chosen, None if prefix is None else prefix / f"{name}-{how}", identity)
            row[how] = scores[f"{name}_{how}_top1"] = result[f"{how}_top1"]
        rows.append(row)
    for how in dict.fromkeys(settings.how):
        scores[f"mean_{how}_top1"] = sum(row[how] for row in rows) / len(rows)
    return scores | {"table": rows}


def _settings_for(settings: Settings, how: str, data: str) -> linear.Settings | finetune.Settings:
    """Return the settings of one evaluation on one data set."""
    shared = settings.model_dump(include=set(EvaluationSettings.model_fields)) | {"data": data}
    if how == "linear":
        return linear.Settings(**shared, **settings.linear.model_dump())
    return finetune.Settings(**shared, **settings.finetune.model_dump())


def _evaluate(
    settings: linear.Settings | finetune.Settings, prefix: Path | None, identity: dict[str, Any]
) -> dict[str, Any]:
    """Return the scores of one evaluation, those in PREFIX.json if they have the same identity."""
    file = None if prefix is None else prefix.with_name(prefix.name + ".json")
    if file is not None and file.exists():
        stored = read_json(file)
        if isinstance(stored, dict) and stored.get("identity") == identity:
            return dict(stored["scores"])
    distributed.barrier()  # until all processes have read the file
    if distributed.is_main():
        print(printable(f"{settings.data}:"), file=sys.stderr)
    scores = linear.run(settings, prefix) if isinstance(settings, linear.Settings) else finetune.run(settings, prefix)
    if file is not None and distributed.is_main():
        write_json(file, {"scores": scores, "identity": identity} | outputs.signature("evaluate"))
    return scores


def _names(data: tuple[str, ...]) -> list[str]:
    """Return unique short names of data sets: the kind of a public one, else the name of its folder."""
    short = []
    for data_set in data:
        kind = data_set.partition(":")[0]
        short.append(kind if kind in KINDS else os.path.basename(os.path.abspath(data_set.removeprefix("hf:"))))
    names = []
    for number, name in enumerate(short, 1):
        if short.count(name) > 1:
            while f"{name}-{number}" in short:  # a folder may have this name
                name += "-"
            name = f"{name}-{number}"
        names.append(name)
    return names


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as aligned text."""
    titles = list(rows[0])
    cells = [titles] + [[f"{x:.2f} %" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(titles))]
    pad = [str.ljust] + [str.rjust] * (len(titles) - 1)
    return "\n".join("  ".join(p(cell, w) for p, cell, w in zip(pad, line, widths, strict=True)) for line in cells)
