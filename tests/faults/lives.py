"""What the tests of faults share: a small run as a process, what became of it, and checkpoints quickly made."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from adclr.model import optim
from adclr.model.method import ADCLR
from adclr.system.runs import Run
from adclr.training import checkpoint, job, schedules
from adclr.weights import snapshot
from tiny import THREADS, TINY, tiny, words

PARTS = ("student", "teacher", "optimizer", "centers")


def command(data: Path, out: Path, **changes: Any) -> list[str]:
    named = TINY | {name.replace("__", "."): value for name, value in changes.items()}
    return ["pretrain", str(data), "--out", str(out), *words(named)]


def start(
    data: Path,
    out: Path,
    *,
    before: str = "",
    ranks: int = 1,
    threads: int = THREADS,
    max_restarts: int = 0,
    **changes: Any,
) -> subprocess.Popen[str]:
    """A run in a process of its own; `before` is Python that is done first, to make things go wrong."""
    text = f"{before}\nimport sys\nfrom adclr.cli import main\nmain(sys.argv[1:])"
    program = ["-c", text] if before else ["-m", "adclr"]
    if ranks > 1:
        if before:
            program = [str(out.with_name(f"{out.name}.py"))]
            Path(program[0]).write_text(text)
        several = ["--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts)]
        program = ["-m", "torch.distributed.run", "--standalone", *several, *program]
    return subprocess.Popen(
        [sys.executable, *program, *command(data, out, **changes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # as many as in the tests' own process, whose runs then round alike
        env=os.environ | {"OMP_NUM_THREADS": str(threads if ranks == 1 else 1)},
    )


def finish(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    return process.returncode, out, errors


def children(process: subprocess.Popen[str]) -> list[int]:
    with suppress(OSError), open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        return [int(number) for number in file.read().split()]
    return []


def kill(process: subprocess.Popen[str]) -> str:
    """kill -9 of a run, and of the processes that torchrun started for it; what it had said on stderr."""
    for number in (process.pid, *children(process)):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    return process.communicate()[1]


def until(there: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60) -> None:
    """Waits while a process runs."""
    deadline = time.monotonic() + seconds
    while not there():
        if time.monotonic() > deadline or process.poll() is not None:
            process.kill()
            raise AssertionError(f"it did not come to that: {finish(process)}")
        time.sleep(0.005)


def starts(run: Path) -> int:
    """How often a run has begun to train."""
    return len(Run(run).starts())


def digest(run: Path) -> str:
    """Of all that a finished run has learned and logged."""
    found = hashlib.sha256()
    for file in [*(run / "checkpoints" / "latest" / f"{part}.safetensors" for part in PARTS), run / "metrics.jsonl"]:
        found.update(file.read_bytes())
    return found.hexdigest()


def made() -> tuple[ADCLR, torch.optim.AdamW]:
    """A method and its optimizer after one step, so that all state is there."""
    settings = tiny(depth=1)
    method = job.build(settings)
    optimizer = schedules.make_optimizer(method.student, settings)
    for parameter in method.student.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.optimizer_step(optimizer, 0.01, 0.0, None, torch.tensor(1.0))
    return method, optimizer


def state(step: int) -> checkpoint.State:
    return checkpoint.State(step, 4, "none", {"sums": [0.0] * 7, "void": []}, 1, 8)


def newest(run: Path) -> int | None:
    """The step of the newest checkpoint; that none is damaged and that `latest` is whole is asserted."""
    found = snapshot.find_newest(Run(run), checkpoint.NAMES)
    assert found.damaged == {}
    latest = run / "checkpoints" / "latest"
    if latest.is_symlink():
        assert snapshot.find_damage(latest, checkpoint.NAMES) is None
    return found.step
