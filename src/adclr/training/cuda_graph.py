"""A whole step as one CUDA graph, which the host launches once instead of kernel by kernel.

Without it, batches of 64 images leave the GPU idle more than half of the time (ViT-S/16 on an H200: 879 images/s, 73 ms
of launching for a step of 33 ms), and threads that read files delay every launch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from adclr.config.parsing import UserError
from adclr.model.named_tensors import Views
from adclr.system.devices import send, shared_stream
from adclr.system.text import one_line

T = TypeVar("T")
Numbers = tuple[float, ...]
Work = Callable[[Views, Tensor], tuple[Tensor, ...]]  # (views, numbers that change from step to step) -> results


class RecordingError(Exception):
    """The work cannot be recorded; it can be done unrecorded, since everything the attempt changed was restored."""


class RecordedStep:
    """`results = recorded(views, numbers)`: the results of `work` on views of the same sizes as the first.

    Recording does the work once with numbers that void it, so that everything set up on first use exists. Drop path
    draws from the seed that is set when the graph runs, not from that of the recording.
    """

    def __init__(self, work: Work, views: Views, void: Numbers) -> None:
        device = views.global_crops.device
        seed = torch.initial_seed()
        self.views = views.map(torch.Tensor.clone)
        self.numbers = send(np.array(void, np.float32), device)
        side = shared_stream("recording", device)
        side.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(side):
                work(self.views, self.numbers)
            torch.cuda.current_stream(device).wait_stream(side)
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # the memory of that run is for the recording
            self.graph, self.results = record_graph(lambda: work(self.views, self.numbers), side)
        finally:
            torch.manual_seed(seed)

    def __call__(self, views: Views, numbers: Numbers) -> tuple[Tensor, ...]:
        """Run the graph on views and numbers of this step; return copies of its results."""
        torch._foreach_copy_(self.views.tensors(), views.tensors())
        self.numbers.copy_(send(np.array(numbers, np.float32), self.numbers.device))
        self.graph.replay()
        return tuple(result.clone() for result in self.results)


def record_graph(work: Callable[[], T], side: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a graph of work that has been done on this stream before, and its results.

    `torch.cuda.graph` is not used: it leaves the current stream capturing after a recording that failed.
    """
    graph, pool, full = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), False
    try:
        with torch.cuda.stream(side):
            # other threads may go on making views meanwhile
            graph.capture_begin(pool, capture_error_mode="thread_local")
            results = work()
            graph.capture_end()
        return graph, results
    except Exception as error:
        full = isinstance(error, torch.OutOfMemoryError)
        reason = one_line(error)
    # outside of the handler, since the error's traceback holds the tensors of the recording
    try:
        _restore(graph, pool, side)
    except Exception:  # generators and allocators are still those of the recording
        raise UserError(f"the step cannot be recorded as a CUDA graph ({reason}); set train.cuda_graph=off") from None
    raise torch.OutOfMemoryError(reason) if full else RecordingError(reason)


_failed: list[torch.cuda.CUDAGraph] = []  # never freed: the allocator of pinned memory keeps using them


def _restore(graph: torch.cuda.CUDAGraph, pool: tuple[int, int], side: torch.cuda.Stream) -> None:
    """End a recording that failed and undo what torch 2.11 to 2.14 leave of it; raise where that cannot be done.

    A recording that CUDA has invalidated, as it does when the host waits, ends with an error before torch has reset
    the memory allocator and the random number generator.
    """
    device = side.device
    _failed.append(graph)
    with torch.cuda.stream(side), suppress(RuntimeError):
        graph.capture_end()
    with suppress(RuntimeError):  # memory is not taken from the pool any more, if the end came that far
        torch._C._cuda_endAllocateToPool(device.index, pool)
    try:
        graph.pool()
    except RuntimeError:  # there is no graph, which would release the pool
        torch._C._cuda_releasePool(device.index, pool)
    graph.reset()
    torch.cuda.synchronize(device)
    try:
        torch.rand(1, device=device)
    except RuntimeError:  # the generator still counts for the recording
        torch.cuda.default_generators[device.index].graphsafe_set_state(torch.Generator(device))
        torch.rand(1, device=device)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
