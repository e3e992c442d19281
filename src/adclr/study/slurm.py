"""Runs the missing runs of a study in SLURM: an array with a task for each, which goes on without this process."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adclr.config.parsing import UserError
from adclr.study.jobs import (
    Workspace,
    build_job,
    describe_progress,
    format_scores,
    is_done,
    last_line,
    run_title,
)
from adclr.study.results import Results
from adclr.study.slurm_queue import ARRAY_SIZE, Queue, QueueUnavailable, Task, split_options
from adclr.study.study_file import Cell, Study
from adclr.system.files import write_json
from adclr.system.progress import ProgressLine

POLL_SECONDS = (1.0, 15.0)  # between looks at the queue: at the beginning, and later
SETTLE_SECONDS = 20.0  # after the end of a task, in which a file system shows its result and SLURM queues it again
MAX_PROGRESS = 3  # running tasks that the progress line describes


def run_cells_in_slurm(
    study: Study, cells: Sequence[Cell], results: Results, workspace: Workspace, options: str, at_once: int | None
) -> None:
    """Submit the runs that the queue does not have yet, and wait until all have ended."""
    words, queue = split_options(options), Queue(workspace.out / "jobs", study.file.stem)
    waiting = {workspace.job_file(cell, results).absolute(): cell for cell in cells}
    jobs = {file: build_job(study, cell, results, workspace) for file, cell in waiting.items()}
    extended = _submit(queue, jobs, words, at_once)
    try:
        failed = _wait(study, waiting, results, workspace, queue, extended)
    except KeyboardInterrupt:
        print(f"the runs stay in SLURM; scancel --name={','.join(queue.arrays())} ends them")
        raise
    if failed:
        raise UserError(f"{len(failed)} of {len(cells)} runs failed, first {failed[0]}; the same command tries again")
    if extended:  # they were submitted by an earlier command, without all of the columns of this one
        left = [cell for file, cell in zip(jobs, cells, strict=True) if file in extended]
        left = [cell for cell in left if not is_done(study, cell, results, workspace)]
        run_cells_in_slurm(study, left, results, workspace, options, at_once)


def _submit(
    queue: Queue, jobs: Mapping[Path, Mapping[str, Any]], options: Sequence[str], at_once: int | None
) -> set[Path]:
    """Submit the jobs that are not in the queue; return those that are there with less to do than now."""
    with queue.locked() as lock:
        try:
            tasks = queue.tasks()
        except QueueUnavailable as error:
            raise UserError(f"SLURM does not answer ({error}); try again later") from None
        queue.forget_ended(tasks)
        new = [file for file in jobs if file not in tasks or not tasks[file].live]
        if len(new) < len(jobs):
            print(f"{len(jobs) - len(new)} runs are in SLURM's queue already", flush=True)
        for first in range(0, len(new), ARRAY_SIZE):
            array = new[first : first + ARRAY_SIZE]
            for file in array:
                write_json(file, jobs[file])
            number = queue.submit(array, options, at_once, lock)
            print(f"{len(array)} runs submitted to SLURM as the array {number}", flush=True)
        return {file for file in jobs if file not in new and not _covers(file, jobs[file])}


def _covers(file: Path, job: Mapping[str, Any]) -> bool:
    """Return whether a job that was submitted does all that a job has to do now."""
    try:
        submitted = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return False
    same = submitted["result"] == job["result"] and submitted["run"] == job["run"]
    return same and all(one in submitted["evaluations"] for one in job["evaluations"])


def _wait(
    study: Study,
    waiting: dict[Path, Cell],
    results: Results,
    workspace: Workspace,
    queue: Queue,
    extended: set[Path],
) -> list[str]:
    """Wait until the jobs have ended; return what to say about those that failed."""
    total, failed = len(waiting), list[str]()
    ended: dict[Path, float] = {}  # jobs without a result: since when they are not in the queue
    started, available = time.monotonic(), True
    with ProgressLine("study", total) as line:
        while True:
            tasks = _read(queue, line, available)
            available, now = tasks is not None, time.monotonic()
            for file, cell in list(waiting.items()):
                task = tasks.get(file) if tasks is not None else None
                if file not in extended and is_done(study, cell, results, workspace):
                    line.say(f"{run_title(cell)}: {format_scores(study, cell, results)}")
                elif tasks is None or (task is not None and task.live):
                    ended.pop(file, None)
                    continue
                elif file in extended:
                    pass
                elif now - ended.setdefault(file, now) < SETTLE_SECONDS:
                    continue
                else:
                    log = workspace.log_file(cell, results)
                    state = [task.state] if task is not None and task.state != "COMPLETED" else []
                    reason = "; ".join([*state, last_line(log) or "without output", f"{log} has all"])
                    failed.append(f"{run_title(cell)} ({reason})")
                    line.say(f"{run_title(cell)}: failed")
                del waiting[file]
            if not waiting:
                return failed
            line.move(total - len(waiting), _describe(waiting, tasks or {}, results, workspace))
            time.sleep(min(POLL_SECONDS[1], POLL_SECONDS[0] + (now - started) / 20))


def _read(queue: Queue, line: ProgressLine, available: bool) -> dict[Path, Task] | None:
    """Return the tasks in the queue; None while SLURM does not answer, which is said once."""
    try:
        return queue.tasks()
    except QueueUnavailable as error:
        if available:
            line.say(f"SLURM does not answer ({error}); the study waits until it does")
        return None


def _describe(waiting: Mapping[Path, Cell], tasks: Mapping[Path, Task], results: Results, workspace: Workspace) -> str:
    """Return how many tasks run, what some of them do, and for what the others wait."""
    running = [cell for file, cell in waiting.items() if file in tasks and tasks[file].running]
    reasons = {task.reason for file, task in tasks.items() if file in waiting and task.state == "PENDING"}
    queued = f"{len(waiting) - len(running)} queued" + (f" ({', '.join(sorted(reasons))})" if reasons else "")
    shown = [describe_progress(cell, results, workspace) for cell in running[:MAX_PROGRESS]]
    return "; ".join([f"{len(running)} running, {queued}", *shown])
