"""Environment variables that OpenMP reads when torch loads it: how its threads wait, and how many there are."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from adclr.system import machine

# Variables of OpenMP and MKL. A user who sets one of a group has decided for the whole group.
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_set_by_us: set[str] = set()  # variables that this program has set in its own environment


def environment(processes: int | None = None) -> dict[str, str]:
    """Return the variables of OpenMP that a process needs before it imports torch; none that the user has set.

    Threads sleep while they wait. By default GNU OpenMP lets them spin for about a millisecond after every operation;
    beside another busy process they then hold the cores that the thread they wait for needs, which made training 5 to
    40 times slower (`benchmarks/busy.py`).

    `processes` share the cores of this one; by default those of torchrun. Where torch would start more threads than
    its share, the number is limited to the share. How busy the cores are does not count: the number of threads changes
    the last bits of sums, and a run that is resumed on a busier machine must end with the same weights.
    """
    variables = {}
    if not _set_by_user(WAIT_VARIABLES):
        variables["OMP_WAIT_POLICY"] = "passive"
    share = max(1, machine.cpu_count() // (processes or machine.local_processes()))
    if share < machine.visible_cores() and not _set_by_user(THREAD_VARIABLES):
        variables["OMP_NUM_THREADS"] = str(share)
    return variables


def _set_by_user(names: tuple[str, ...]) -> bool:
    return any(name in os.environ and name not in _set_by_us for name in names)


def configure() -> None:
    """Set the variables of `environment` for this process and those it starts, unless torch is loaded."""
    if "torch" not in sys.modules:
        variables = environment()
        os.environ.update(variables)
        _set_by_us.update(variables)


@contextmanager
def passive_waiting() -> Iterator[None]:
    """Let threads of OpenMP sleep while they wait, if it is loaded meanwhile; leave the environment as it was.

    For use as a library: OpenMP reads its variables when torch loads it, and what the host program or its child
    processes do with OpenMP is theirs to decide.
    """
    if "torch" in sys.modules or _set_by_user(WAIT_VARIABLES):
        yield
        return
    os.environ["OMP_WAIT_POLICY"] = "passive"
    try:
        yield
    finally:
        del os.environ["OMP_WAIT_POLICY"]
