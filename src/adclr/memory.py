"""What a process may use of its machine: memory, on the host and on the GPU, and cores."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # whoever asks for cores alone need not wait for it
    import torch

GIB = 2**30
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


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
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):  # no such limit, or the word "max"
        quota, period = (CGROUP / "cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, int(cores))
