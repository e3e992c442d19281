"""Transfer: the linear probe or the fine-tuning, or both, on several labelled data sets, and a table at the end.

What is done is kept in PLACE/DATA-HOW.json; the same command again does what is missing, if weights, images and
settings are what they were.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from adclr.config.sections import Several, UserError
from adclr.data import stamps
from adclr.data.sets.classes import open_labelled
from adclr.data.sets.public import KINDS
from adclr.evals import finetune as tuning
from adclr.evals import linear as probing
from adclr.evals.finetune import Protocol as Tuning
from adclr.evals.linear import Protocol as Probe
from adclr.evals.task import Conditions, weights_of
from adclr.system import distributed, outputs
from adclr.system.devices import choose
from adclr.system.files import read_json, write_json

Chosen = probing.Settings | tuning.Settings


class Settings(Conditions):
    data: Several[str] = Field((), description="labelled folders, or KIND:DIR; see linear")
    how: Several[Literal["linear", "finetune"]] = Field(
        ("linear",), min_length=1, description="what is done with each of them"
    )
    linear: Probe = Probe()
    finetune: Tuning = Tuning()

    def of(self, how: str, data: str) -> Chosen:
        """The settings of one line of the table."""
        given = self.model_dump(include=set(Conditions.model_fields)) | {"data": data}
        if how == "linear":
            return probing.Settings(**given, **self.linear.model_dump())
        return tuning.Settings(**given, **self.finetune.model_dump())


def run(settings: Settings, place: Path | None = None) -> dict[str, Any]:
    if not settings.weights or not settings.data:
        raise UserError("transfer needs weights and labelled data; give --weights and --data")
    names = _names(settings.data)
    # all is looked at before anything is trained, so that a mistake in the last costs nothing
    labelled = {name: open_labelled(data) for name, data in zip(names, settings.data, strict=True)}
    start = weights_of(settings, choose(settings.device)).fingerprint()
    scores: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name, data in zip(names, settings.data, strict=True):
        found = labelled[name]
        row: dict[str, Any] = {"data": name, "classes": len(found.classes), "train": len(found.train.labels)}
        row["val"] = len(found.val.labels)
        images = [stamps.fingerprint(split.source) for split in (found.train, found.val)]
        for how in dict.fromkeys(settings.how):
            chosen = settings.of(how, data)
            identity = {"settings": chosen.model_dump(mode="json"), "start": start, "images": images}
            here = None if place is None else place / f"{name}-{how}"
            result = _line(chosen, here, identity)
            row[how] = scores[f"{name}_{how}_top1"] = result[f"{how}_top1"]
        rows.append(row)
    for how in dict.fromkeys(settings.how):
        scores[f"mean_{how}_top1"] = sum(row[how] for row in rows) / len(rows)
    return scores | {"table": rows}


def _line(settings: Chosen, place: Path | None, identity: dict[str, Any]) -> dict[str, Any]:
    """One score; that of an earlier time, if it was of the same."""
    file = None if place is None else place.with_name(place.name + ".json")
    if file is not None and file.exists():
        before = read_json(file)
        if isinstance(before, dict) and before.get("identity") == identity:
            return dict(before["scores"])
    distributed.barrier()  # all have looked
    if distributed.is_main():
        print(f"{settings.data}:", file=sys.stderr)
    scores = probing.run(settings, place) if isinstance(settings, probing.Settings) else tuning.run(settings, place)
    if file is not None and distributed.is_main():
        write_json(file, {"scores": scores, "identity": identity} | outputs.signature("evaluate"))
    return scores


def _names(data: tuple[str, ...]) -> list[str]:
    """A short name of each, no two alike: the kind of a public data set, else the name of its folder."""
    short = []
    for one in data:
        kind = one.partition(":")[0]
        short.append(kind if kind in KINDS else os.path.basename(os.path.abspath(one.removeprefix("hf:"))))
    taken = set(short)
    names = []
    for number, name in enumerate(short, 1):
        if short.count(name) > 1:
            while f"{name}-{number}" in taken:  # a folder may be called so
                name += "-"
            name = f"{name}-{number}"
        names.append(name)
    return names


def table(rows: list[dict[str, Any]]) -> str:
    """The rows, one below the other."""
    heads = list(rows[0])
    cells = [heads] + [[f"{x:.2f} %" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    pad = [str.ljust] + [str.rjust] * (len(heads) - 1)
    return "\n".join("  ".join(p(cell, w) for p, cell, w in zip(pad, line, widths, strict=True)) for line in cells)
