"""Threads that load items and others that assemble them into batches, in order, a bounded number ahead.

Threads that are stuck are replaced once, and the new ones load the same batches in the same order.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Generic, ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from adclr.config.parsing import UserError
from adclr.system.text import printable

# Batches loaded ahead by default: enough that threads never wait for a step to end, few enough that memory stays small.
AHEAD = 3
# Images a thread takes at a time. 16 threads read 3 600 files/s one by one; in eights, and with fewer system calls for
# each, 17 000 and 30 000 (two other runs on the same kind of machine).
ITEMS_PER_TASK = 8
# Threads that assemble batches: while one waits for the GPU, which decodes 256 files in 18 ms when idle and in 110
# beside a step, the other plans. Two gave 87.3 % of the speed of a constant batch, one 83.4 % (ViT-S/16, H200).
NUM_ASSEMBLERS = 2
# The thread that launches a step's thousands of operations can lose Python's lock to a decoder at each. Asking for
# it back after 0.5 ms instead of 5 gave 553 images/s instead of 492 (ViT-S/16, batch 128, H200, 16 threads).
SWITCH_SECONDS = 5e-4
# Threads count as stuck after so long without a finished task; with the polling of `result`, after about a minute.
PATIENCE_SECONDS = 50.0

Request = TypeVar("Request")  # what a batch is made for, such as its epoch and the indices of its images
Item = TypeVar("Item")
Batch = TypeVar("Batch")
P = ParamSpec("P")
T = TypeVar("T")


def load_in_order(
    requests: Iterable[Request],
    indices_of: Callable[[Request], NDArray[np.int64]],
    load: Callable[[int], Item],
    assemble: Callable[[Request, list[Item]], Batch],
    current_file: Callable[[], str],
    num_workers: int,
    gpu: int | None = None,
    ahead: int = AHEAD,
    assemblers: int = NUM_ASSEMBLERS,
) -> Generator[Batch, None, None]:
    """Yield `assemble(request, items)` for each request, in order; `load` loads the items of `indices_of(request)`.

    Without workers nothing is loaded ahead: one thread, which can be watched and abandoned, loads what is asked for.
    `gpu` is the one that assembling threads work on; `current_file` names, for messages, what is being read.
    """
    loader = _OrderedLoader(indices_of, load, assemble, current_file, max(1, num_workers), assemblers, gpu)
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        for request in requests:
            loader.submit(request)
            if len(loader.pending) > (ahead if num_workers else 0):
                yield loader.next_batch()
        while loader.pending:
            yield loader.next_batch()
    finally:
        loader.close()
        sys.setswitchinterval(switch_interval)


class _OrderedLoader(Generic[Request, Item, Batch]):
    """Two pools of threads: one loads items, the other assembles batches. Batches come in the order of requests."""

    def __init__(
        self,
        indices_of: Callable[[Request], NDArray[np.int64]],
        load: Callable[[int], Item],
        assemble: Callable[[Request, list[Item]], Batch],
        current_file: Callable[[], str],
        num_workers: int,
        num_assemblers: int,
        gpu: int | None,
    ) -> None:
        self.indices_of, self.load, self.assemble, self.current_file = indices_of, load, assemble, current_file
        self.num_workers, self.num_assemblers, self.gpu = num_workers, num_assemblers, gpu
        self.pending: deque[tuple[Request, Future[Batch]]] = deque()
        self._start_threads()

    def _start_threads(self) -> None:
        self.decoders = ThreadPool(self.num_workers, "decode")
        self.assemblers = ThreadPool(self.num_assemblers, "assemble", self._select_gpu)

    def _select_gpu(self) -> None:
        """Select the GPU in a new thread, which would otherwise work on the first."""
        if self.gpu is not None:
            import torch

            torch.cuda.set_device(self.gpu)

    def submit(self, request: Request) -> None:
        """Start to load and assemble the batch of a request."""
        indices = self.indices_of(request)
        parts = [indices[i : i + ITEMS_PER_TASK] for i in range(0, len(indices), ITEMS_PER_TASK)]
        loads = [self.decoders.submit(self._load_all, part) for part in parts]

        def assemble() -> Batch:
            return self.assemble(request, [item for part in loads for item in part.result()])

        self.pending.append((request, self.assemblers.submit(assemble)))

    def _load_all(self, indices: NDArray[np.int64]) -> list[Item]:
        return [self.load(int(index)) for index in indices]

    def next_batch(self) -> Batch:
        """Return the batch of the oldest request; try once more if the threads are stuck or out of memory."""
        try:
            batch = self._wait_for_first()
        except (StalledError, MemoryError) as error:
            print(printable(f"{_problem(error, self._stop())}; it is tried once more"), file=sys.stderr)
            self._start_threads()
            requests = [request for request, _ in self.pending]
            self.pending.clear()
            for request in requests:
                self.submit(request)
            try:
                batch = self._wait_for_first()
            except (StalledError, MemoryError) as second:
                raise UserError(_problem_and_remedy(second, self._stop())) from None
        self.pending.popleft()
        return batch

    def _wait_for_first(self) -> Batch:
        return wait_for(self.pending[0][1], self.decoders, self.assemblers)

    def _stop(self) -> str:
        """End the threads and return what they were reading."""
        file = self.current_file()
        self.close()
        return file

    def close(self) -> None:
        """End the threads; what they have not begun is dropped."""
        # decoders first: an assembler then sees that its images are canceled and gives up at once
        self.decoders.close()
        self.assemblers.close()


def _problem(error: Exception, file: str) -> str:
    if isinstance(error, StalledError):
        return f"no image has come for a minute while reading {file}"
    files = getattr(error, "__notes__", [file])  # a thread that runs out of memory while it reads notes its own file
    return f"there is no memory for {files[0]}"


def _problem_and_remedy(error: Exception, file: str) -> str:
    if isinstance(error, StalledError):
        return f"{_problem(error, file)}, twice; check the disk or network it lies on, or remove it"
    return f"{_problem(error, file)}, twice; lower data.num_workers, or start another run with less data.max_side"


class StalledError(UserError):
    """No thread has finished a task for so long that none will."""

    def __init__(self) -> None:
        super().__init__("no image has come for a minute; check the disk or network the images lie on")


class ThreadPool:
    """A pool of threads that do tasks in the order in which these are submitted, and can be abandoned when stuck."""

    def __init__(self, count: int, name: str, start: Callable[[], None] = lambda: None) -> None:
        self.num_finished = 0  # tasks, roughly; `result` only looks whether it changes
        self.stuck = False
        self._start = start
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [Thread(target=self._work, name=f"{name}_{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call of a function and return the future of its result."""
        future: Future[T] = Future()
        self._queue.put((future, lambda: function(*args, **kwargs)))
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the tasks that have not begun and wait for the others, unless the threads are stuck."""
        while True:
            try:
                task = self._queue.get_nowait()
            except Empty:
                break
            if task is not None:
                task[0].cancel()
        for _ in self._threads:
            self._queue.put(None)
        for thread in () if self.stuck else self._threads:
            thread.join()

    def _work(self) -> None:
        self._start()
        while (task := self._queue.get()) is not None:
            future, call = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            self.num_finished += 1
            del task, future, call  # with what they hold, which may be large


def wait_for(future: Future[T], *pools: ThreadPool) -> T:
    """Return the result of a task; raise `StalledError` if these pools have finished none for a minute."""
    num_finished, since = -1, 0.0
    while not future.done():
        now, count = time.monotonic(), sum(pool.num_finished for pool in pools)
        if count != num_finished:
            num_finished, since = count, now
        elif now - since > PATIENCE_SECONDS:
            for pool in pools:
                pool.stuck = True
            raise StalledError
        try:
            return future.result(timeout=PATIENCE_SECONDS / 20)
        except TimeoutError:
            continue  # or an error of the task, which is raised below
    return future.result()
