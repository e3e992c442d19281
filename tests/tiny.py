"""What tests share: tiny settings, and the program as a user runs it."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from adclr.config import parsing
from adclr.config.settings import Settings
from fork_server import ForkServer

# As small as a run can be and still have every part.
TINY: dict[str, Any] = {
    "views.global_size": 16,
    "views.local_size": 8,
    "views.num_local": 2,
    "views.num_queries": 2,
    "model.patch_size": 4,
    "model.dim": 16,
    "model.depth": 2,
    "model.num_heads": 2,
    "method.head_hidden_dim": 24,
    "method.head_bottleneck_dim": 8,
    "method.num_prototypes": 32,
    "method.momentum": 0.9,
    "optim.warmup_epochs": 0.5,
    "optim.lr": 0.01,
    "train.epochs": 2,
    "train.batch_size": 8,
    "train.log_every_steps": 1,
    "train.device": "cpu",
    "train.report": False,
}

# and a distillation
TINY_STUDENT = {
    name: value for name, value in TINY.items() if not name.startswith("method.") and name != "views.num_queries"
}


def tiny(**changes: Any) -> Settings:
    """Tiny settings; changes by full name with '__' for '.' or by their short name."""
    return parsing.build(Settings, TINY, {name.replace("__", "."): value for name, value in changes.items()})


def words(changes: dict[str, Any]) -> list[str]:
    return [f"{name}={'null' if value is None else value}" for name, value in changes.items()]


# Beside other tests one thread each: more only wait for one another.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2

Adclr = Callable[..., subprocess.CompletedProcess[str]]


_server: list[ForkServer] = []  # of this process, from its first command on


def adclr_command(
    *arguments: object, program: str | None = None, fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does, or by a program that calls it; variables are added to the environment.

    With `fresh` in a new process, else in a fork of one that has imported torch.
    """
    usual = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    variables = usual | environment
    words = [*map(str, arguments)]
    if not _server and not fresh:
        _server.append(ForkServer(usual))
        atexit.register(_server[0].close)
    if not fresh and _server[0].serves(variables):
        return _server[0].run(program, words, variables, timeout=600)
    command = [sys.executable, *(["-c", program] if program else ["-m", "adclr"]), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=variables)
