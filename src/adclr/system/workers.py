"""Threads that can be left behind: one that waits for a dead disk keeps nothing else from going on, or from ending.

Those of `ThreadPoolExecutor` are waited for when the program ends, for ever if need be.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from adclr.config.sections import UserError

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
