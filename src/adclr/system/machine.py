"""Memory, of the host and of the GPU, cores and processes of the machine, and how OpenMP's threads use the cores."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from adclr.config.errors import UserError

if TYPE_CHECKING:  # counting cores needs no torch
    import torch

GIB = 2**30
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self/stat")
STARTED = time.monotonic()  # about when this process started, where the system does not say
LONGEST_START = 30.0  # seconds from the start of a process to the line above, on a slow disk too
# Variables of OpenMP and MKL. A user who sets one of a group has decided for the whole group.
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_set_by_us: set[str] = set()  # variables that this program has set in its own environment


def process_start() -> float:
    """Return when this command started, on the clock of `time.monotonic`.

    A shell whose last command this is may have become this process: then the system's answer is the shell's start.
    """
    with suppress(OSError, ValueError, IndexError, AttributeError):  # Linux; elsewhere the first import counts
        ticks = int(PROCESS.read_text().rpartition(")")[2].split()[19])  # since the machine was started
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        start = time.monotonic() - max(0.0, age)
        return start if STARTED - start < LONGEST_START else STARTED
    return STARTED


def host_memory() -> float:
    """Return the bytes that a process can still get: what the machine or container has left, caches counted as free."""
    limits = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))]
    with suppress(OSError, ValueError):  # Linux; elsewhere the number above stands
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        limits = [1024.0 * int(lines["MemAvailable"].split()[0])]
    with suppress(OSError, ValueError):  # no such limit, or the word "max"
        limits.append(float(int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text())))
    return max(0.0, min(limits))


def available_gpu_memory(device: torch.device) -> float:
    """Return the bytes of a GPU that this process has or can get; what is free is split among those that share it."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.get_per_process_memory_fraction(device.index or 0) * total
    return min(free / gpu_sharers() + torch.cuda.memory_reserved(device), limit)


def gpu_sharers() -> int:
    """Return how many processes of torchrun share a GPU: 1 unless there are more of them than GPUs."""
    import torch

    return max(1, math.ceil(local_processes() / max(1, torch.cuda.device_count())))


def gpu_bytes(device: str) -> int | None:
    """Return the memory of the GPU that would be used; None if that is the CPU."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def _visible_cores() -> int:
    """Return the number of cores that torch counts: it does not know that time on them can be limited."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_count() -> int:
    """Return the number of cores that this process may use; in a container also the time on them can be limited."""
    cores = _visible_cores()
    with suppress(OSError, ValueError):  # no such limit, or the word "max"
        quota, period = (CGROUP / "cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def local_processes() -> int:
    """Return how many processes torchrun has started on this machine; 1 without it."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text)) if text.isdecimal() else 1


def cpu_share() -> int:
    """Return the number of cores for each of the processes that torchrun has started on this machine."""
    return max(1, cpu_count() // local_processes())


def num_processes() -> int:
    """Return how many processes torchrun has started; 1 without it."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1 or (int(text) > 1 and "RANK" not in os.environ):
        raise UserError(
            f"WORLD_SIZE={text} is in the environment but torchrun is not at work; unset it or use torchrun"
        )
    return int(text)


# -- threads of OpenMP: it reads its variables when torch loads it --


def openmp_environment(processes: int | None = None) -> dict[str, str]:
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
    share = max(1, cpu_count() // (processes or local_processes()))
    if share < _visible_cores() and not _set_by_user(THREAD_VARIABLES):
        variables["OMP_NUM_THREADS"] = str(share)
    return variables


def _set_by_user(names: tuple[str, ...]) -> bool:
    return any(name in os.environ and name not in _set_by_us for name in names)


def configure_openmp() -> None:
    """Set the variables of `openmp_environment` for this process and those it starts, unless torch is loaded."""
    if "torch" not in sys.modules:
        variables = openmp_environment()
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
