"""Arrays of jobs in SLURM's queue: submits one, and reads the states of its tasks, by sbatch and squeue."""

from __future__ import annotations

import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from adclr.config.parsing import UserError
from adclr.system.files import lock_file, write_atomically

TASK = Path(__file__).with_name("task.sh")
ARRAY_SIZE = 1000  # tasks of one array; SLURM's default limit is 1001
COMMAND_SECONDS = 120.0  # after which sbatch or squeue is given up
# queued again when preempted; SIGUSR1 to task.sh two minutes before the time is up
DEFAULTS = ("--ntasks=1", "--requeue", "--open-mode=append", "--signal=B:USR1@120")
# options of sbatch that the study itself needs
RESERVED = ("--array", "--job-name", "--wrap", "--wait", "--test-only", "--clusters", "--help", "--version")
RESERVED_LETTERS = "aJWMhV"
# states of a task that has ended; all others are of one that is waiting or running
ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"}
)


class QueueUnavailable(Exception):
    """SLURM does not answer, which it does again when its controller is back."""


@dataclass(frozen=True)
class Task:
    """A task of an array, as the queue shows it."""

    job: str  # 17_3
    state: str  # PENDING, RUNNING, ...
    reason: str

    @property
    def live(self) -> bool:
        """Return whether it waits or runs."""
        return self.state not in ENDED

    @property
    def running(self) -> bool:
        """Return whether it runs."""
        return self.state == "RUNNING"


class Queue:
    """The arrays that a study has submitted.

    Each array has a file FOLDER/NAME.txt, written before it is submitted, with a line for the job of each task. NAME is
    that of the array in the queue, where it is found again, whatever happens to this process.
    """

    def __init__(self, folder: Path, study: str) -> None:
        self.folder, self.study = folder, re.sub(r"[^\w.-]", "_", study)

    @contextmanager
    def locked(self) -> Iterator[IO[bytes]]:
        """Lock the queue of the folder, so that of two commands one submits; yield the file that holds the lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".slurm.lock", "ab") as file:
            lock_file(file, wait=True)
            yield file

    def arrays(self) -> dict[str, list[Path]]:
        """Return the files of the jobs of each array, by its name."""
        files = sorted(self.folder.glob("adclr-*.txt"))
        return {file.stem: [Path(line) for line in file.read_text().splitlines()] for file in files}

    def tasks(self) -> dict[Path, Task]:
        """Return the task of each job that the queue shows, by the file of the job; a live one if there are several."""
        arrays = self.arrays()
        if not arrays:
            return {}
        tasks: dict[Path, Task] = {}
        for line in _read_queue(list(arrays)).splitlines():
            name, index, state, job, reason = [*line.split("|", 4), "", "", "", ""][:5]
            jobs = arrays.get(name, [])
            if not index.isdecimal() or int(index) >= len(jobs):
                continue
            task = Task(job, state.split(" ")[0], reason)
            if task.live or jobs[int(index)] not in tasks:
                tasks[jobs[int(index)]] = task
        return tasks

    def forget_ended(self, tasks: dict[Path, Task]) -> None:
        """Delete the files of arrays of which no task waits or runs."""
        for name, jobs in self.arrays().items():
            if not any(job in tasks and tasks[job].live for job in jobs):
                (self.folder / f"{name}.txt").unlink(missing_ok=True)

    def submit(self, jobs: Sequence[Path], options: Sequence[str], at_once: int | None, lock: IO[bytes]) -> str:
        """Submit an array with a task for each job; return its number.

        The lock is inherited by sbatch: should this process be killed meanwhile, the next command waits until sbatch
        has ended, and then finds the array in the queue.
        """
        name = f"adclr-{self.study}-{secrets.token_hex(4)}"
        listed = self.folder / f"{name}.txt"
        write_atomically(listed, "".join(f"{job}\n" for job in jobs).encode())
        limit = f"%{at_once}" if at_once is not None else ""
        messages = str((self.folder / f"{name}.log").absolute()).replace("%", "%%")
        command = ["sbatch", "--parsable", f"--job-name={name}", f"--array=0-{len(jobs) - 1}{limit}"]
        command += [f"--output={messages}", *DEFAULTS, *options, str(TASK), sys.executable, str(listed.absolute())]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMMAND_SECONDS,
                pass_fds=[lock.fileno()],
            )
        except FileNotFoundError:
            listed.unlink()
            raise _not_installed("sbatch") from None
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(command, 1, "", f"sbatch did not answer for {COMMAND_SECONDS:.0f} s")
        if done.returncode == 0:
            return done.stdout.strip().split(";")[0]
        return self._submitted_after_all(name, listed, done.stderr)

    def _submitted_after_all(self, name: str, listed: Path, errors: str) -> str:
        """Return the number of an array whose sbatch failed but which is in the queue; else raise what sbatch says."""
        reason = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no reason is given")
        try:
            lines = _read_queue([name]).splitlines()
        except QueueUnavailable:  # nobody knows; the file stays, by which the next command will find the array
            raise UserError(f"SLURM does not answer ({reason}); try again, and what was submitted is found") from None
        if lines:
            return lines[0].split("|")[3].split("_")[0]
        listed.unlink()
        raise UserError(f"SLURM refused the runs ({reason}); fix --slurm")


def _read_queue(names: Sequence[str]) -> str:
    """Return a line NAME|INDEX|STATE|JOB|REASON for each task of arrays; SLURM shows ended ones for some minutes."""
    command = ["squeue", "--noheader", "--array", "--me", "--states=all", f"--name={','.join(names)}"]
    try:
        done = subprocess.run(
            [*command, "--format=%j|%K|%T|%i|%r"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_SECONDS,
        )
    except FileNotFoundError:
        raise _not_installed("squeue") from None
    except subprocess.TimeoutExpired:
        raise QueueUnavailable(f"squeue did not answer for {COMMAND_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise QueueUnavailable(done.stderr.strip())
    return done.stdout


def _not_installed(program: str) -> UserError:
    return UserError(f"{program} was not found; run this on a machine of a SLURM cluster, or with --launcher local")


def split_options(text: str) -> list[str]:
    """Return the words of options of sbatch; refuse those that the study itself gives."""
    try:
        words = shlex.split(text)
    except ValueError:
        raise UserError(f"--slurm {text} has a quotation mark without its partner; close it") from None
    for word in words:
        long = word.split("=")[0]  # sbatch takes shortened names
        if (len(long) > 3 and any(name.startswith(long) for name in RESERVED)) or (
            word[:1] == "-" and word[1:2] in RESERVED_LETTERS and word != "-"
        ):
            raise UserError(f"{long} in --slurm is given by the study itself; leave it out")
    return words
