"""Runs the missing runs of a study, as many at once as there are GPUs, each in a process of its own."""

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

from adclr.config.parsing import UserError
from adclr.study.results import Results, get_score
from adclr.study.study_file import Cell, Evaluation, Study, data_name, data_path
from adclr.system import openmp
from adclr.system.files import write_json
from adclr.system.progress import ProgressLine
from adclr.system.runs import Run

POLL_SECONDS = 0.2  # between checks of the processes
STOP_SECONDS = 60.0  # that a process has to save and exit


@dataclass(frozen=True)
class Workspace:
    """Folders of runs and data, and the GPUs."""

    out: Path  # a folder for each run, and jobs/ with the job and the log of each
    folders: Mapping[str, Path]  # of data sets, by name
    gpus: Sequence[str | None]  # CUDA_VISIBLE_DEVICES of each run at once

    def has_weights(self, cell: Cell, results: Results) -> bool:
        """Return whether the weights of a run are here."""
        return (self.out / results.run_name(cell) / "backbone.safetensors").exists()


@dataclass(frozen=True)
class Worker:
    """A process that trains and scores a run."""

    cell: Cell
    slot: int
    run: Run
    log: Path
    process: subprocess.Popen[bytes]
    started: float

    @property
    def name(self) -> str:
        """Return the name of its run."""
        return f"{self.cell.label}, seed {self.cell.seed}"

    def progress(self) -> str:
        """Return how far it is: the last epoch of its metrics, the last line of its log once there are weights."""
        if (self.run.path / "backbone.safetensors").exists() or self.cell.untrained:
            return f"{self.name}: {_last_line(self.log)[:60]}"
        last = re.search(r'"epoch": ([0-9.]+)', _last_line(self.run.path / "metrics.jsonl"))
        epoch = float(last[1]) if last else 0.0
        return f"{self.name}: epoch {epoch:.0f} of {self.cell.settings.train.epochs}"


def list_gpus() -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES of each run at once; without GPUs, [None] for one run at a time."""
    import torch

    if not torch.cuda.is_available():
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(visible.split(",")) if visible else [str(number) for number in range(torch.cuda.device_count())]


def pending_evaluations(study: Study, cell: Cell, results: Results, workspace: Workspace) -> list[Evaluation] | None:
    """Return the missing evaluations whose data is here; None if neither they nor a training can be done."""
    result = results.read(cell)
    has_weights = cell.untrained or (result is not None and workspace.has_weights(cell, results))
    if not has_weights and not _can_train(cell, results, workspace):
        return None
    pending = [
        one
        for one in results.missing_evaluations(cell, study.outline.evaluations)
        if one.data is not None and data_name(one.data) in workspace.folders
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


def run_cells(
    study: Study, cells: Sequence[Cell], results: Results, workspace: Workspace, minutes: float | None
) -> list[Cell]:
    """Run cells in their order; return those not begun, since they would have ended after `minutes`."""
    waiting, begun, free = list(cells), time.monotonic(), list(range(len(workspace.gpus)))
    workers: list[Worker] = []
    durations: list[float] = []  # seconds, of the runs that are done
    failed: list[str] = []
    unusable: set[str] = set()  # keys of the runs that failed
    with ProgressLine("study", len(cells)) as line, _open_pipe() as pipe, _stopping(workers):
        while waiting or workers:
            late = minutes is not None and _is_late(begun, minutes, durations)
            for cell in list(waiting):
                if cell.source is not None and cell.source.key in unusable:
                    waiting.remove(cell)
                    unusable.add(cell.key)
                    needed = f"it needs the weights of {cell.source.label}, which failed"
                    failed.append(f"{cell.label}, seed {cell.seed} ({needed})")
            while free and not late and (ready := _next_ready(waiting, workers)) is not None:
                waiting.remove(ready)
                workers.append(_start(study, ready, results, workspace, free.pop(0), pipe))
            for worker in [one for one in workers if one.process.poll() is not None]:
                workers.remove(worker)
                free.append(worker.slot)
                seconds, code = time.monotonic() - worker.started, worker.process.returncode
                if code == 0:
                    durations.append(seconds)
                    line.say(f"{worker.name}: {seconds:.0f} s; {_format_scores(study, worker.cell, results)}")
                elif code == 2 and not durations:  # a mistake that the next run would repeat
                    raise UserError(f"{worker.name}: {_last_line(worker.log).removeprefix('adclr: ')}")
                else:
                    if not workspace.has_weights(worker.cell, results):  # its scores may be what failed
                        unusable.add(worker.cell.key)
                    failed.append(f"{worker.name} ({_last_line(worker.log)}; {worker.log} has all)")
                    line.say(f"{worker.name}: failed with exit code {code}")
            if late and not workers:
                break
            line.move(len(cells) - len(waiting) - len(workers), "; ".join(worker.progress() for worker in workers))
            time.sleep(POLL_SECONDS if workers else 0)
    if failed:
        raise UserError(f"{len(failed)} of {len(cells)} runs failed, first {failed[0]}; the same command tries again")
    return waiting


def _next_ready(waiting: Sequence[Cell], workers: Sequence[Worker]) -> Cell | None:
    """Return the first cell whose source is neither waiting nor running."""
    unfinished = {cell.key for cell in (*waiting, *(worker.cell for worker in workers))}
    return next((cell for cell in waiting if cell.source is None or cell.source.key not in unfinished), None)


def _is_late(begun: float, minutes: float, durations: Sequence[float]) -> bool:
    """Return whether a run that began now would end after the time."""
    expected = median(durations) if durations else 0.0
    return time.monotonic() - begun + expected > 60 * minutes


@contextmanager
def _stopping(workers: list[Worker]) -> Iterator[None]:
    """Stop the workers and wait until they have saved, whatever ends this process except kill -9."""

    def exit_on_signal(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handler = signal.signal(signal.SIGTERM, exit_on_signal)
    try:
        yield
    finally:
        for worker in workers:
            worker.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for worker in workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _open_pipe() -> Iterator[int]:
    """Yield the read end of a pipe that closes when this process ends, even by kill -9; workers then save and exit."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)


def build_job(study: Study, cell: Cell, results: Results, workspace: Workspace) -> dict[str, Any]:
    """Return the job of a run, which `worker.run_job` does."""
    data, folders = cell.data, workspace.folders
    overrides = dict(cell.overrides)
    if cell.source is not None:
        weights = str(workspace.out / results.run_name(cell.source))
        overrides["distill.teacher" if cell.source_name == "teacher" else "model.init"] = weights
    return {
        "run": str(workspace.out / results.run_name(cell)),
        "result": str(results.file(cell)),
        "data": data_path(data, folders) if data_name(data) in folders else None,
        "fingerprint": results.fingerprint(cell),
        "command": cell.settings.command,
        "recipe": cell.recipe,
        "overrides": overrides,
        "identity": cell.identity,
        "untrained": cell.untrained,
        "evaluations": [
            {
                "evaluation": one.model_dump(mode="json"),
                "data": data_path(one.data, folders),
                "fingerprint": results.fingerprints.evaluations.get(one.data),
            }
            for one in pending_evaluations(study, cell, results, workspace) or ()
            if one.data is not None
        ],
    }


def _start(study: Study, cell: Cell, results: Results, workspace: Workspace, slot: int, pipe: int) -> Worker:
    name = results.run_name(cell)
    run, file = Run(workspace.out / name), workspace.out / "jobs" / f"{name}.json"
    write_json(file, build_job(study, cell, results, workspace))
    gpu, log = workspace.gpus[slot], file.with_suffix(".log")
    threads = openmp.environment(len(workspace.gpus))
    with open(log, "ab") as output, _share_of_cores(slot, len(workspace.gpus)):
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "adclr.study.worker", str(file), str(pipe)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | threads | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
            pass_fds=[pipe],
            process_group=0,  # Ctrl-C reaches this process alone, which then stops the worker, once
        )
    return Worker(cell, slot, run, log, process, time.monotonic())


@contextmanager
def _share_of_cores(slot: int, slots: int) -> Iterator[None]:
    """Give processes started meanwhile cores of their own: threads of all runs on all cores wait for one another."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < slots:
        yield
        return
    os.sched_setaffinity(0, cores[slot::slots])  # of this thread, and so of the process that it starts
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _format_scores(study: Study, cell: Cell, results: Results) -> str:
    result = results.read(cell)
    scores = [(title, get_score(result, one), one.digits) for title, one in study.outline.evaluations.items()]
    return ", ".join(f"{title} {score:.{digits}f}" for title, score, digits in scores if score is not None)


def _last_line(path: Path) -> str:
    """Return the last line of a file that is not empty."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 4096))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
