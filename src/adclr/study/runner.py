"""Runs the missing runs of a study on this machine, as many at once as there are GPUs, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import FrameType

from adclr.config.parsing import UserError
from adclr.study.jobs import Workspace, build_job, describe_progress, format_scores, last_line, run_title
from adclr.study.results import Results
from adclr.study.study_file import Cell, Study
from adclr.system import machine
from adclr.system.files import write_json
from adclr.system.progress import ProgressLine

POLL_SECONDS = 0.2  # between checks of the processes
STOP_SECONDS = 60.0  # that a process has to save and exit


@dataclass(frozen=True)
class Worker:
    """A process that trains and scores a run."""

    cell: Cell
    slot: int
    log: Path
    process: subprocess.Popen[bytes]
    started: float


def list_gpus() -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES of each run at once; without GPUs, [None] for one run at a time."""
    import torch

    if not torch.cuda.is_available():
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(visible.split(",")) if visible else [str(number) for number in range(torch.cuda.device_count())]


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
                    line.say(f"{run_title(worker.cell)}: {seconds:.0f} s; {format_scores(study, worker.cell, results)}")
                elif code == 2 and not durations:  # a mistake that the next run would repeat
                    raise UserError(f"{run_title(worker.cell)}: {last_line(worker.log).removeprefix('adclr: ')}")
                else:
                    if not workspace.has_weights(worker.cell, results):  # its scores may be what failed
                        unusable.add(worker.cell.key)
                    failed.append(f"{run_title(worker.cell)} ({last_line(worker.log)}; {worker.log} has all)")
                    line.say(f"{run_title(worker.cell)}: failed with exit code {code}")
            if late and not workers:
                break
            progress = "; ".join(describe_progress(worker.cell, results, workspace) for worker in workers)
            line.move(len(cells) - len(waiting) - len(workers), progress)
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


def _start(study: Study, cell: Cell, results: Results, workspace: Workspace, slot: int, pipe: int) -> Worker:
    file = workspace.job_file(cell, results)
    write_json(file, build_job(study, cell, results, workspace))
    gpu, log = workspace.gpus[slot], workspace.log_file(cell, results)
    threads = machine.openmp_environment(len(workspace.gpus))
    with open(log, "ab") as output, _share_of_cores(slot, len(workspace.gpus)):
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "adclr.study.worker", str(file), str(pipe)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | threads | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
            pass_fds=[pipe],
            process_group=0,  # Ctrl-C reaches this process alone, which then stops the worker, once
        )
    return Worker(cell, slot, log, process, time.monotonic())


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
