"""One step: the losses and gradients of its micro-batches, then optimizer, teacher and centers.

Training, `adclr plan` and benchmarks/step.py go through the same one, so that what is timed is what is trained.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from adclr.config.sections import UserError
from adclr.config.settings import Settings
from adclr.model import optim
from adclr.model.method import ADCLR
from adclr.model.views import Views
from adclr.system import distributed
from adclr.system.devices import send
from adclr.system.text import one_line
from adclr.training import schedules
from adclr.training.cuda_graph import Recorded
from adclr.training.sharding import Pieces, sync_gradients


class Step:
    """`losses, ok = step(views of each micro-batch, values)`

    `record` asks for a CUDA graph; it is made where one micro-batch is a step, of one process, and (nearly) always as
    large, which is not so where Sinkhorn's targets are of masked patches.
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
        alone, self.in_pieces = distributed.world_size() == 1, isinstance(optimizer, Pieces)
        self.model = method if alone or self.in_pieces else _in_parallel(method, settings)
        self.record = record and alone and device.type == "cuda" and accumulate == 1
        self.record = self.record and not (settings.masked and settings.method.target == "sinkhorn")
        self.recorded: dict[tuple[object, ...], Recorded] = {}  # by what stands still, and the number of masked patches

    def __call__(self, views: Iterable[Views], values: schedules.Values) -> tuple[Tensor, Tensor]:
        """The losses in the order of `method.Losses`, mean over the micro-batches, and whether the step was good."""
        if not self.record:
            return self._take(views, self._told(values), values.frozen)
        (made,) = views
        frozen = values.frozen
        kind = *frozen, made.masks and len(made.masks.index)
        if kind not in self.recorded:
            self.recorded.clear()  # first, since each holds the memory of a step
            # a temperature that is not a number makes a loss that is not, and such a step changes nothing
            void = schedules.Values(0.0, 0.0, 1.0, float("nan"), *frozen)
            try:
                self.recorded[kind] = Recorded(lambda v, n: self._take([v], n, frozen), made, void.numbers)
            except (torch.OutOfMemoryError, UserError):
                raise
            except Exception as error:  # before anything was recorded
                torch.cuda.synchronize(self.device)
                self.record = False
                self.method.forget()
                reason = one_line(error)
                print(f"the step could not be recorded as a CUDA graph, so it is slower ({reason})", file=sys.stderr)
                return self._take([made], self._told(values), frozen)
        losses, ok = self.recorded[kind](made, values.numbers)
        return losses, ok

    def _told(self, values: schedules.Values) -> schedules.Values | Tensor:
        """A GPU is told the numbers whether it is recorded or not, so that they are rounded alike: to the bit."""
        if self.device.type != "cuda":
            return values
        return send(np.array(values.numbers, np.float32), self.device)

    def _take(
        self, views: Iterable[Views], values: schedules.Values | Tensor, frozen: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor]:
        numbers = values if isinstance(values, Tensor) else values.numbers
        lr, weight_decay, momentum, temperature, query_temperature = numbers
        losses = self._learn(views, temperature, query_temperature)
        student, (freeze_last_layer, freeze_backbone) = self.method.student, frozen
        still = [*student.head.last_layer.parameters()] if freeze_last_layer else []
        for parameter in [*still, *(student.backbone.parameters() if freeze_backbone else ())]:
            parameter.grad = None  # without a gradient it is not decayed either
        if isinstance(self.optimizer, Pieces):
            self.optimizer.take_gradients()
        ok = optim.update(self.optimizer, lr, weight_decay, self.clip_norm, losses[0], self.in_pieces)
        self.optimizer.zero_grad(set_to_none=True)
        self.method.update(momentum, ok, head_only=freeze_backbone)
        return losses, ok

    def _learn(
        self, views: Iterable[Views], teacher_temperature: float | Tensor, query_temperature: float | Tensor
    ) -> Tensor:
        """Forward and backward over the micro-batches; views are taken one by one, so that few lie in memory."""
        model, sums = self.model, torch.zeros(5, device=self.device)
        for micro, made in enumerate(views):
            last = micro == self.accumulate - 1
            if self.in_pieces:
                sync_gradients(self.method, last)
            with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext():
                with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
                    losses = model(made, teacher_temperature, query_temperature)
                (losses.total / self.accumulate).backward()
            sums += torch.stack([loss.detach() for loss in losses]) / self.accumulate
        return sums


def _in_parallel(method: ADCLR, settings: Settings) -> DistributedDataParallel:
    model = DistributedDataParallel(method)
    if settings.train.reduce_precision == "bfloat16":
        model.register_comm_hook(None, bf16_compress_hook)
    return model


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
