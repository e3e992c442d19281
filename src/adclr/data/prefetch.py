"""Views rendered while the step before runs: on a GPU by a thread on its own CUDA stream, a bounded number ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from adclr.data.feed import Batch
from adclr.system.devices import set_current_device, shared_stream


class Rendered(Protocol):
    """What is rendered of a batch."""

    def tensors(self) -> list[Tensor]:
        """Return all its tensors."""
        ...


R = TypeVar("R", bound=Rendered)


class Prefetcher(Generic[R]):
    """An iterator over what is rendered of batches; closing it closes the batches.

    Views of three batches are in memory at most: of the one the GPU works on, of the one that is queued behind it, and
    of the one being rendered.
    """

    def __init__(
        self, batches: Generator[Batch[Any], None, None], render: Callable[[Batch[Any]], R], device: torch.device
    ) -> None:
        self.batches, self.render, self.device = batches, render, device
        self.seconds_waited = 0.0  # for images, by the thread that takes the views
        self.last: R | None = None  # that was taken
        self._thread: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            self.stream = shared_stream("views", device)
            self.stream.wait_stream(torch.cuda.current_stream(device))
            self._used: torch.cuda.Event | None = None  # the end of the work on the views before the last
            self._thread = ThreadPoolExecutor(1, "views", set_current_device, (device,))
            self._next: Future[tuple[R, torch.cuda.Event] | None] = self._thread.submit(self._render_next)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> R:
        if self._thread is None:
            started = time.monotonic()
            batch = next(self.batches)
            self.seconds_waited += time.monotonic() - started
            self.last = self.render(batch)
            return self.last
        current = torch.cuda.current_stream(self.device)
        queued = current.record_event()
        if self._used is not None:
            self._used.synchronize()  # else the host would run ahead of the GPU, and memory fill with views
        self._used = queued
        started = time.monotonic()
        rendered = self._next.result()
        self.seconds_waited += time.monotonic() - started
        if rendered is None:
            raise StopIteration
        self._next = self._thread.submit(self._render_next)
        views, ready = rendered
        current.wait_event(ready)
        for tensor in views.tensors():
            tensor.record_stream(current)  # its memory is not reused before this stream is done with it
        self.last = views
        return views

    def _render_next(self) -> tuple[R, torch.cuda.Event] | None:
        """Return the next views and the event after which they are ready; None after the last batch."""
        batch = next(self.batches, None)
        if batch is None:
            return None
        with torch.cuda.stream(self.stream):
            if batch.packed.bytes.is_cuda:
                batch.packed.bytes.record_stream(self.stream)
            return self.render(batch), self.stream.record_event()

    def close(self) -> None:
        """Stop the thread and close the batches."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self.batches.close()
