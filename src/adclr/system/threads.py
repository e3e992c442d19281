"""Items brought by threads, put together into batches by others, in order, a bounded number ahead.

If the threads are stuck, others do their work again, once, in the same order.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from adclr.config.sections import UserError
from adclr.system.text import printable
from adclr.system.workers import Stuck, Workers, result

# Batches decoded ahead, unless it is said otherwise: enough that threads never wait for a step to end, few enough that
# memory stays small.
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
    reading: Callable[[], str],
    num_workers: int,
    gpu: int | None = None,
    ahead: int = AHEAD,
    assemblers: int = ASSEMBLERS,
) -> Generator[Made, None, None]:
    """`assemble(job, items)` for each job, in order; `bring` has brought the items that `wanted(job)` names.

    Without workers nothing is done ahead: one thread, which can be watched and left behind, reads what is asked for.
    `gpu` is the one that assembling threads work on; `reading` says, for a person, what is being read just now.
    """

    def bring_all(indices: NDArray[np.int64]) -> list[Item]:
        return [bring(int(index)) for index in indices]

    crew = _Crew(wanted, bring_all, assemble, reading, max(1, num_workers), gpu, assemblers)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        for job in jobs:
            crew.order(job)
            if len(crew.waiting) > (ahead if num_workers else 0):
                yield crew.next()
        while crew.waiting:
            yield crew.next()
    finally:
        crew.close()
        sys.setswitchinterval(switch)


class _Crew(Generic[Job, Item, Made]):
    """The threads: some bring, others assemble."""

    def __init__(
        self,
        wanted: Callable[[Job], NDArray[np.int64]],
        bring: Callable[[NDArray[np.int64]], list[Item]],
        assemble: Callable[[Job, list[Item]], Made],
        reading: Callable[[], str],
        num_workers: int,
        gpu: int | None,
        num_assemblers: int,
    ) -> None:
        self.wanted, self.bring, self.assemble, self.reading = wanted, bring, assemble, reading
        self.num_workers, self.gpu, self.num_assemblers = num_workers, gpu, num_assemblers
        self.waiting: deque[tuple[Job, Future[Made]]] = deque()
        self._begin()

    def _begin(self) -> None:
        self.decoders = Workers(self.num_workers, "decode")
        self.assemblers = Workers(self.num_assemblers, "assemble", self._be_there)

    def _be_there(self) -> None:
        """A thread begins on the first GPU, whichever the others are on."""
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)

    def order(self, job: Job) -> None:
        indices = self.wanted(job)
        parts = [indices[i : i + TOGETHER] for i in range(0, len(indices), TOGETHER)]
        read = [self.decoders.submit(self.bring, part) for part in parts]

        def collect() -> Made:
            return self.assemble(job, [item for part in read for item in part.result()])

        self.waiting.append((job, self.assemblers.submit(collect)))

    def next(self) -> Made:
        try:
            made = self._first()
        except (Stuck, MemoryError) as error:
            print(printable(f"{_trouble(error, self._stop())}; it is tried once more"), file=sys.stderr)
            self._begin()
            again = [job for job, _ in self.waiting]
            self.waiting.clear()
            for job in again:
                self.order(job)
            try:
                made = self._first()
            except (Stuck, MemoryError) as another:
                raise UserError(_remedy(another, self._stop())) from None
        self.waiting.popleft()
        return made

    def _first(self) -> Made:
        return result(self.waiting[0][1], self.decoders, self.assemblers)

    def _stop(self) -> str:
        """What was being read."""
        reading = self.reading()
        self.close()
        return reading

    def close(self) -> None:
        # decoders first: an assembler then finds its images cancelled and gives up at once
        self.decoders.close()
        self.assemblers.close()


def _trouble(error: Exception, reading: str) -> str:
    if isinstance(error, Stuck):
        return f"no image has come for a minute while reading {reading}"
    files = getattr(error, "__notes__", [reading])  # of the one who ran out of it, if that was while reading
    return f"there is no memory for {files[0]}"


def _remedy(error: Exception, reading: str) -> str:
    if isinstance(error, Stuck):
        return f"{_trouble(error, reading)}, twice; see to the disk or network it lies on, or remove it"
    return f"{_trouble(error, reading)}, twice; lower data.num_workers, or start another run with less data.max_side"
