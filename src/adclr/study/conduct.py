"""Runs what is missing of a study, as many at once as there are GPUs, each in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from adclr.config.sections import UserError
from adclr.study.outline import Cell, Evaluation, Study, locate, name_of
from adclr.study.results import Results, value
from adclr.system import openmp
from adclr.system.files import write_json
from adclr.system.progress import Line
from adclr.system.runs import Run

LOOK = 0.2  # seconds between looks at what runs
STOP = 60.0  # seconds that a process has to save and end


@dataclass(frozen=True)
class Place:
    """Where runs and data lie."""

    out: Path  # a folder for each run, jobs/ for what each was told and what it said
    folders: Mapping[str, Path]  # of data sets, by name
    gpus: Sequence[str | None]  # CUDA_VISIBLE_DEVICES of each run at once

    def has_weights(self, cell: Cell, results: Results) -> bool:
        return (self.out / results.name(cell) / "backbone.safetensors").exists()


@dataclass(frozen=True)
class Worker:
    cell: Cell
    slot: int
    run: Run
    log: Path
    process: subprocess.Popen[bytes]
    started: float


def gpus() -> list[str | None]:
    """One for each run at once; without any, one run at a time."""
    import torch

    if not torch.cuda.is_available():
        return [None]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(named.split(",")) if named else [str(number) for number in range(torch.cuda.device_count())]


def todo(study: Study, cell: Cell, results: Results, place: Place) -> list[Evaluation] | None:
    """What can be scored with the data at hand of a run that is there or can be trained; None: nothing can be done."""
    kept = results.of(cell)
    there = cell.untrained or (kept is not None and place.has_weights(cell, results))
    if not there and name_of(study.outline.data) not in place.folders:
        return None
    scored = [
        one
        for one in results.missing(cell, study.outline.evaluations)
        if one.data is not None and name_of(one.data) in place.folders
    ]
    return scored if scored or (kept is None and not cell.untrained) else None


def carry_out(study: Study, cells: Sequence[Cell], results: Results, place: Place, minutes: float | None) -> list[Cell]:
    """Runs cells in their order; those left out, since they would not have ended in time."""
    waiting, begun, free = list(cells), time.monotonic(), list(range(len(place.gpus)))
    workers: list[Worker] = []
    spent: list[float] = []  # seconds, of the runs that are done
    failed: list[str] = []
    with Line("study", len(cells)) as line, _leash() as leash, _stopping(workers):
        while waiting or workers:
            late = minutes is not None and _late(begun, minutes, spent)
            while waiting and free and not late:
                workers.append(_start(study, waiting.pop(0), results, place, free.pop(0), leash))
            for worker in [one for one in workers if one.process.poll() is not None]:
                workers.remove(worker)
                free.append(worker.slot)
                seconds, name = time.monotonic() - worker.started, _name(worker.cell)
                if worker.process.returncode == 0:
                    spent.append(seconds)
                    line.say(f"{name}: {seconds:.0f} s; {_told(study, worker.cell, results)}")
                elif worker.process.returncode == 2 and not spent:  # a mistake that the next run would repeat
                    raise UserError(f"{name}: {_last_line(worker.log).removeprefix('adclr: ')}")
                else:
                    failed.append(f"{name} ({_last_line(worker.log)}; {worker.log} has all)")
                    line.say(f"{name}: failed with exit code {worker.process.returncode}")
            if late and not workers:
                break
            line.move(len(cells) - len(waiting) - len(workers), "; ".join(_state(worker) for worker in workers))
            time.sleep(LOOK if workers else 0)
    if failed:
        raise UserError(f"{len(failed)} of {len(cells)} runs failed, first {failed[0]}; the same command tries again")
    return waiting


def _late(begun: float, minutes: float, spent: Sequence[float]) -> bool:
    """Whether a run that began now would end after the time."""
    expected = median(spent) if spent else 0.0
    return time.monotonic() - begun + expected > 60 * minutes


@contextmanager
def _stopping(workers: list[Worker]) -> Iterator[None]:
    """Whatever ends this process, but kill -9, first waits until those it has started have saved and ended."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        for worker in workers:
            worker.process.terminate()
        deadline = time.monotonic() + STOP
        for worker in workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _leash() -> Iterator[int]:
    """A pipe that ends when this process does, by kill -9 too: those that hold its other end then save and end."""
    held, own = os.pipe()
    try:
        yield held
    finally:
        os.close(held)
        os.close(own)


def job_of(study: Study, cell: Cell, results: Results, place: Place) -> dict[str, Any]:
    """Returns what the process of a run is told."""
    return {
        "run": str(place.out / results.name(cell)),
        "result": str(results.file(cell)),
        "data": locate(study.outline.data, place.folders) if name_of(study.outline.data) in place.folders else None,
        "fingerprint": None if cell.untrained else results.data.training,
        "recipe": cell.recipe,
        "said": dict(cell.said),
        "known_by": cell.known_by,
        "untrained": cell.untrained,
        "evaluations": [
            {
                "evaluation": one.model_dump(mode="json"),
                "data": locate(one.data, place.folders),
                "fingerprint": results.data.evaluations.get(one.data),
            }
            for one in todo(study, cell, results, place) or ()
            if one.data is not None
        ],
    }


def _start(study: Study, cell: Cell, results: Results, place: Place, slot: int, leash: int) -> Worker:
    name = results.name(cell)
    run, file = Run(place.out / name), place.out / "jobs" / f"{name}.json"
    write_json(file, job_of(study, cell, results, place))
    gpu, log = place.gpus[slot], file.with_suffix(".log")
    threads = openmp.environment(len(place.gpus))
    with open(log, "ab") as said, _share_of_cores(slot, len(place.gpus)):
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "adclr.study.work", str(file), str(leash)],
            stdout=said,
            stderr=subprocess.STDOUT,
            env=os.environ | threads | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
            pass_fds=[leash],
            process_group=0,  # Ctrl-C reaches this process alone, which then tells it, once
        )
    return Worker(cell, slot, run, log, process, time.monotonic())


@contextmanager
def _share_of_cores(slot: int, slots: int) -> Iterator[None]:
    """What is started meanwhile runs on its own cores: threads of all runs on all cores wait for one another."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < slots:
        yield
        return
    os.sched_setaffinity(0, cores[slot::slots])  # of this thread, and so of the process that it starts
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _name(cell: Cell) -> str:
    return f"{cell.label}, seed {cell.seed}"


def _told(study: Study, cell: Cell, results: Results) -> str:
    found = results.of(cell)
    numbers = [(title, value(found, one), one.digits) for title, one in study.outline.evaluations.items()]
    return ", ".join(f"{title} {number:.{digits}f}" for title, number, digits in numbers if number is not None)


def _state(worker: Worker) -> str:
    """How far a run is: by the last line of its metrics, and of what it said once there are weights."""
    if (worker.run.path / "backbone.safetensors").exists() or worker.cell.untrained:
        return f"{_name(worker.cell)}: {_last_line(worker.log)[:60]}"
    last = re.search(r'"epoch": ([0-9.]+)', _last_line(worker.run.path / "metrics.jsonl"))
    epoch = float(last[1]) if last else 0.0
    return f"{_name(worker.cell)}: epoch {epoch:.0f} of {worker.cell.settings.train.epochs}"


def _last_line(log: Path) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - 4096))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
