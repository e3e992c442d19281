"""Items brought by threads, put together into batches by others, in order, a bounded number ahead.

If the threads are stuck, others do their work again, once, in the same order.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from adclr.config.sections import UserError
from adclr.system.text import printable

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
            import torch

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


P = ParamSpec("P")


T = TypeVar("T")


# Without a piece of work done, after which threads count as stuck; with the polling below a minute.
PATIENCE_SECONDS = 50.0


class Stuck(UserError):
    """No thread has finished anything for so long that none will."""

    def __init__(self) -> None:
        super().__init__("no image has come for a minute; see to the disk or network the images lie on")


class Workers:
    """A number of threads; they work in the order in which they are given work."""

    def __init__(self, count: int, name: str, begin: Callable[[], None] = lambda: None) -> None:
        self.finished = 0  # pieces of work, about; that it moves is all that counts
        self.stuck = False
        self._begin = begin
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [Thread(target=self._work, name=f"{name}_{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._queue.put((future, lambda: work(*arguments, **named)))
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing more is begun; what has been begun is waited for, or left behind if it is stuck."""
        while True:
            try:
                item = self._queue.get_nowait()
            except Empty:
                break
            if item is not None:
                item[0].cancel()
        for _ in self._threads:
            self._queue.put(None)
        for thread in () if self.stuck else self._threads:
            thread.join()

    def _work(self) -> None:
        self._begin()
        while (item := self._queue.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            self.finished += 1
            del item, future, work  # with what they hold, which may be large


def result(future: Future[T], *workers: Workers) -> T:
    """The result of a piece of work; `Stuck` if these have not finished any for a minute."""
    finished, since = -1, 0.0
    while not future.done():
        now, count = time.monotonic(), sum(some.finished for some in workers)
        if count != finished:
            finished, since = count, now
        elif now - since > PATIENCE_SECONDS:
            for some in workers:
                some.stuck = True
            raise Stuck
        try:
            return future.result(timeout=PATIENCE_SECONDS / 20)
        except TimeoutError:
            continue  # or the work's own, which comes up below
    return future.result()
