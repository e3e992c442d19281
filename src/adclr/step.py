"""One step: the losses and gradients of its micro-batches, then optimizer, teacher and centers.

Training, `adclr plan` and benchmarks/step.py go through the same one, so that what is timed is what is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from adclr import distributed, optim
from adclr.augment import Views
from adclr.method import ADCLR
from adclr.recorded import Recorded
from adclr.settings import Settings


class Step:
    """`losses, ok = step(views of each micro-batch, values)`

    `record` asks for a CUDA graph; it is made where one micro-batch is a step, of one process, and always as large,
    which masked patches are not.
    """

    def __init__(
        self,
        settings: Settings,
        method: ADCLR,
        optimizer: torch.optim.AdamW,
        device: torch.device,
        dtype: torch.dtype | None,  # of autocast
        accumulate: int = 1,  # micro-batches of a step
        record: bool = False,
    ) -> None:
        self.method, self.optimizer, self.accumulate = method, optimizer, accumulate
        self.device, self.dtype, self.clip_norm = device, dtype, settings.optim.clip_norm
        alone = distributed.world_size() == 1
        self.model = method if alone else DistributedDataParallel(method)
        self.record = record and alone and device.type == "cuda" and accumulate == 1 and not settings.masked
        self.recorded: Recorded | None = None

    def __call__(self, views: Iterable[Views], values: optim.Values) -> tuple[Tensor, Tensor]:
        """The losses in the order of `method.Losses`, mean over the micro-batches, and whether the step was good."""
        losses = self.learn(views, values.teacher_temperature)
        last_layer = self.method.student.head.last_layer
        ok = optim.update(self.optimizer, last_layer, values, self.clip_norm, losses[0])
        self.optimizer.zero_grad(set_to_none=True)
        self.method.update(values.momentum, ok)
        return losses, ok

    def learn(self, views: Iterable[Views], teacher_temperature: float) -> Tensor:
        """Forward and backward over the micro-batches; views are taken one by one, so that few lie in memory."""
        if self.record:
            (made,) = views
            return self._record(made)(made, teacher_temperature)
        sums = torch.zeros(5, device=self.device)
        for micro, made in enumerate(views):
            last = micro == self.accumulate - 1
            model = self.model
            with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext():
                sums += self._once(made, teacher_temperature)
        return sums

    def _record(self, views: Views) -> Recorded:
        if self.recorded is None:
            seed = torch.initial_seed()  # which recording would move on from
            parameters = self.method.student.parameters()
            self.recorded = Recorded(self._once, self.method.forget, parameters, views)
            torch.manual_seed(seed)
        return self.recorded

    def _once(self, views: Views, teacher_temperature: float | Tensor) -> Tensor:
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            losses = self.model(views, teacher_temperature)
        (losses.total / self.accumulate).backward()
        return torch.stack([loss.detach() for loss in losses]) / self.accumulate


def seconds(work: Callable[[], object], device: torch.device, count: int, repeats: int = 1) -> list[float]:
    """The time of one piece of work, the mean of `count` in a row, for each repeat; the caller warms up."""
    found = []
    for _ in range(repeats):
        if device.type == "cuda":  # by the GPU's own clock: the host runs ahead of it
            first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            first.record()
            for _ in range(count):
                work()
            last.record()
            last.synchronize()
            found.append(first.elapsed_time(last) / 1000 / count)
        else:
            started = time.perf_counter()
            for _ in range(count):
                work()
            found.append((time.perf_counter() - started) / count)
    return found
