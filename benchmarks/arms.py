"""Images/s of the training step of each arm of a study, one after the other, so that equal times can be chosen.

    python benchmarks/arms.py STUDY [--only ARM] [--set train.parallel_teacher=true] [--batch 64]
                              [--steps 30] [--warmup 8] [--repeats 5] [--json FILE]

STUDY is a .yaml file. By the code that training runs, with the settings and batch of each arm and views of noise, made
once; arms that only differ in data, seed or given weights are timed once. A distillation has its teacher's forward pass
in the step; teachers have random weights, which take the same time. Compare figures of one run only.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from adclr.config import parsing
from adclr.config.distillation import DistillSettings
from adclr.study.study_file import Cell, read_study
from adclr.system import devices
from adclr.system.files import write_json
from adclr.system.runs import provenance
from adclr.training import distillation, job, micro_batch, schedules
from adclr.training.methods import Method
from adclr.training.step import Step, time_calls
from adclr.weights.backbone import architecture


def build_method(cell: Cell) -> Method:
    """The method of an arm, with random weights."""
    settings = cell.settings
    if not isinstance(settings, DistillSettings):
        return job.build(settings)
    assert cell.source is not None
    return distillation.assemble(settings, architecture(cell.source.settings).build().eval())


def work(cell: Cell, batch: int, device: torch.device) -> Callable[[], object]:
    """One step of an arm, ready to be done again and again."""
    settings, method = cell.settings, build_method(cell).to(device)
    optimizer = schedules.make_optimizer(method.student, settings)
    dtype = devices.autocast_dtype("auto", device)
    job.compile_method(method, settings, device, dtype, batch)
    step = Step(settings, method, optimizer, device, dtype)
    views = micro_batch.random_views(settings, batch, device)
    plan = schedules.Schedules(settings, 1000)
    values = plan.at(plan.total_steps // 2)
    return lambda: step([views], values)


def same_work(cell: Cell) -> str:
    """What decides the time of a step, as text."""
    fixed = settings_of(cell) | {"teacher": settings_of(cell.source) if cell.source else None}
    return json.dumps(fixed, sort_keys=True)


def settings_of(cell: Cell) -> dict[str, Any]:
    tree = cell.settings.model_dump(mode="json", exclude={"data", "probe", "optim"})
    for name in ("seed", "epochs"):
        tree["train"].pop(name)
    tree["model"].pop("init", None)  # which a distillation does not have
    tree.pop("distill", None)
    return {"command": cell.settings.command, **tree}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--only", action="append", default=[], help="arms whose name has this in it; may be repeated")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all arms")
    parser.add_argument("--batch", type=int, help="instead of that of each arm")
    for name, number in (("steps", 30), ("warmup", 8), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device, rows = devices.select_device("auto"), []
    timed: dict[str, str] = {}  # what decides the time of a step -> the first arm with it
    for cell in read_study(given.study).cells:
        if cell.untrained or (given.only and not any(words in cell.label for words in given.only)):
            continue
        key = same_work(cell)
        if key in timed:
            if timed[key] != cell.label:
                print(f"{cell.label}: as {timed[key]}", flush=True)
            continue
        timed[key] = cell.label
        if given.set:
            changes = parsing.parse_words(given.set)
            settings = parsing.build(type(cell.settings), cell.settings.model_dump(mode="json"), changes)
            cell = replace(cell, settings=settings)
        batch = given.batch or cell.settings.train.batch_size
        once = work(cell, batch, device)
        spent = time_calls(once, device, given.steps, given.repeats, given.warmup)
        middle = statistics.median(spent)
        row = {"arm": cell.label, "batch": batch, "images_per_second": batch / middle, "milliseconds": 1000 * middle}
        row |= {"least_milliseconds": 1000 * min(spent), "most_milliseconds": 1000 * max(spent)}
        rows.append(row)
        rate = f"{batch / middle:.0f}" if batch / middle >= 10 else f"{batch / middle:.2g}"
        print(f"{cell.label}, batch {batch}: {rate} images/s, {1000 * middle:.2f} ms", flush=True)
        del once
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if given.json:
        write_json(given.json, {"study": given.study.stem, "rows": rows, "provenance": provenance()})


if __name__ == "__main__":
    main()
