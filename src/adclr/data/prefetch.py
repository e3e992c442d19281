"""Views made while the step runs: on a GPU in a thread and a CUDA stream of their own, a bounded number ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from adclr.data.feed import Batch
from adclr.system.devices import be_on, stream


class Made(Protocol):
    def tensors(self) -> list[Tensor]: ...


M = TypeVar("M", bound=Made)


class Ahead(Generic[M]):
    """An iterator over views, or what else is made of batches, which closes the batches it is given.

    Views of three batches are in memory at most: of the one the GPU works on, of the one that is queued behind it, and
    of the one being made.
    """

    def __init__(
        self, batches: Generator[Batch[Any], None, None], make: Callable[[Batch[Any]], M], device: torch.device
    ) -> None:
        self.batches, self.make, self.device = batches, make, device
        self.seconds_waited = 0.0  # for images, by whoever takes the views
        self.last: M | None = None  # that were taken
        self._thread: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            self.stream = stream("views", device)
            self.stream.wait_stream(torch.cuda.current_stream(device))
            self._used: torch.cuda.Event | None = None  # the work on the views before last
            self._thread = ThreadPoolExecutor(1, "views", be_on, (device,))
            self._next: Future[tuple[M, torch.cuda.Event] | None] = self._thread.submit(self._make)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> M:
        if self._thread is None:
            started = time.monotonic()
            batch = next(self.batches)
            self.seconds_waited += time.monotonic() - started
            self.last = self.make(batch)
            return self.last
        current = torch.cuda.current_stream(self.device)
        queued = current.record_event()
        if self._used is not None:
            self._used.synchronize()  # else the host would run ahead of the GPU, and memory fill with views
        self._used = queued
        started = time.monotonic()
        made = self._next.result()
        self.seconds_waited += time.monotonic() - started
        if made is None:
            raise StopIteration
        self._next = self._thread.submit(self._make)
        views, ready = made
        current.wait_event(ready)
        for tensor in views.tensors():
            tensor.record_stream(current)  # its memory is not given away before this stream is done with it
        self.last = views
        return views

    def _make(self) -> tuple[M, torch.cuda.Event] | None:
        batch = next(self.batches, None)
        if batch is None:
            return None
        with torch.cuda.stream(self.stream):
            if batch.packed.bytes.is_cuda:
                batch.packed.bytes.record_stream(self.stream)
            return self.make(batch), self.stream.record_event()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self.batches.close()
