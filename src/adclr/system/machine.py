"""What a process may use of its machine: memory, on the host and on the GPU, and cores."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from adclr.config.errors import UserError

if TYPE_CHECKING:  # whoever asks for cores alone need not wait for it
    import torch

GIB = 2**30
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
# Variables of OpenMP and MKL. Whoever sets one of a group has decided what the group is about.
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_set_here: set[str] = set()  # variables that this program has set in its own environment


def host_memory() -> float:
    """Bytes a process can still get: what the machine or the container has left, caches counted as free."""
    limits = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))]
    with contextlib.suppress(OSError, ValueError):  # Linux; elsewhere the number above stands
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        limits = [1024.0 * int(lines["MemAvailable"].split()[0])]
    with contextlib.suppress(OSError, ValueError):  # no such limit, or the word "max"
        limits.append(float(int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text())))
    return max(0.0, min(limits))


def available(device: torch.device) -> float:
    """Bytes of the GPU that this process has or can get."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.get_per_process_memory_fraction(device.index or 0) * total
    return min(free + torch.cuda.memory_reserved(device), limit)


def cpu_count() -> int:
    """Cores this process may use; those of a container can be fewer than the machine's, or time on them limited."""
    cores = float(_visible_cores())
    with contextlib.suppress(OSError, ValueError):  # no such limit, or the word "max"
        quota, period = (CGROUP / "cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, int(cores))


def _visible_cores() -> int:
    """Cores that torch counts: it does not know that time on them can be limited."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_processes() -> int:
    """How many processes torchrun has started on this machine; 1 without it."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text)) if text.isdecimal() else 1


def cpu_share() -> int:
    """Cores for each of the processes that torchrun has started on this machine."""
    return max(1, cpu_count() // local_processes())


def thread_environment(processes: int | None = None) -> dict[str, str]:
    """Returns the variables of OpenMP that a process needs before it imports torch; none that the user has set.

    Threads sleep while they wait. By default GNU OpenMP lets them spin for about a millisecond after every operation;
    beside another busy process they then hold the cores that the thread they wait for needs, which made training 5 to
    40 times slower (`benchmarks/busy.py`).

    `processes` share the cores of this one; by default those of torchrun. Where torch would start more threads than
    its share, it is told the share. How busy the cores are does not count: the number of threads changes the last bits
    of sums, and a run that is resumed on a busier machine must end with the same weights.
    """
    variables = {}
    if not _set_by_user(WAIT_VARIABLES):
        variables["OMP_WAIT_POLICY"] = "passive"
    share = max(1, cpu_count() // (processes or local_processes()))
    if share < _visible_cores() and not _set_by_user(THREAD_VARIABLES):
        variables["OMP_NUM_THREADS"] = str(share)
    return variables


def _set_by_user(names: tuple[str, ...]) -> bool:
    return any(name in os.environ and name not in _set_here for name in names)


def prepare_threads() -> None:
    """Sets the variables of `thread_environment` for this process and those it starts, unless torch is loaded."""
    if "torch" not in sys.modules:
        variables = thread_environment()
        os.environ.update(variables)
        _set_here.update(variables)


@contextlib.contextmanager
def sleeping_threads() -> Iterator[None]:
    """Lets threads of OpenMP sleep while they wait, if it is loaded meanwhile; leaves the environment as it was.

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


def gpu_bytes(device: str) -> int | None:
    """The memory of the GPU that would be used; None if that is the CPU."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def num_processes() -> int:
    """How many processes torchrun has started; 1 without it."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1 or (int(text) > 1 and "RANK" not in os.environ):
        raise UserError(
            f"WORLD_SIZE={text} is in the environment but torchrun is not at work; unset it or use torchrun"
        )
    return int(text)
