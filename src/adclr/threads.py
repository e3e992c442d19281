"""Items brought by threads, put together into batches by others, in order, a bounded number ahead."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

# Batches decoded ahead: enough that threads never wait for a step to end, few enough that memory stays small.
AHEAD = 3
# Images a thread takes at a time. 16 threads read 3 600 files/s one by one; in eights, and with fewer system calls for
# each, 17 000 and 30 000 (two other runs on the same kind of machine).
TOGETHER = 8
# Threads that put batches together: while one waits for the GPU, which decodes 256 files in 18 ms when idle and in 110
# beside a step, the other plans. Two gave 87.3 % of the speed of a constant batch, one 83.4 % (ViT-S/16, H200).
ASSEMBLERS = 2
# The thread that launches a step's thousands of operations can lose Python's lock to a decoder at each. Asking for
# it back after 0.5 ms instead of 5 gave 553 images/s instead of 492 (ViT-S/16, batch 128, H200, 16 threads).
SWITCH_SECONDS = 5e-4

Job = TypeVar("Job")
Item = TypeVar("Item")
Made = TypeVar("Made")


def in_order(
    jobs: Iterable[Job],
    wanted: Callable[[Job], NDArray[np.int64]],
    bring: Callable[[int], Item],
    assemble: Callable[[Job, list[Item]], Made],
    num_workers: int,
    gpu: int | None = None,
) -> Generator[Made, None, None]:
    """`assemble(job, items)` for each job, in order; `bring` has brought the items that `wanted(job)` names.

    Without workers all of it is done here, when it is asked for. `gpu` is the one that assembling threads work on.
    """

    def bring_all(indices: NDArray[np.int64]) -> list[Item]:
        return [bring(int(index)) for index in indices]

    if num_workers == 0:
        for job in jobs:
            yield assemble(job, bring_all(wanted(job)))
        return

    def collect(job: Job, parts: list[Future[list[Item]]]) -> Made:
        return assemble(job, [item for part in parts for item in part.result()])

    def be_there() -> None:
        """A thread begins on the first GPU, whichever the others are on."""
        if gpu is not None:
            torch.cuda.set_device(gpu)

    waiting: deque[Future[Made]] = deque()
    decoders = ThreadPoolExecutor(num_workers, thread_name_prefix="decode")
    assembler = ThreadPoolExecutor(ASSEMBLERS, "assemble", be_there)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        for job in jobs:
            indices = wanted(job)
            parts = [indices[i : i + TOGETHER] for i in range(0, len(indices), TOGETHER)]
            waiting.append(assembler.submit(collect, job, [decoders.submit(bring_all, part) for part in parts]))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # decoders first: an assembler then finds its images cancelled and gives up at once
        decoders.shutdown(wait=True, cancel_futures=True)
        assembler.shutdown(wait=True, cancel_futures=True)
        sys.setswitchinterval(switch)
