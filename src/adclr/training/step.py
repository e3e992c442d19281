"""One training step: losses and gradients of its micro-batches, then optimizer, teacher and centers.

Training, `adclr plan` and benchmarks/step.py use the same class, so that what is timed is what is trained.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.model import optim
from adclr.model.method import ADCLR, Branch
from adclr.model.named_tensors import Views
from adclr.system import distributed
from adclr.system.devices import send
from adclr.system.text import one_line
from adclr.training import schedules
from adclr.training.cuda_graph import RecordedStep
from adclr.training.fsdp import ShardedAdamW, sync_gradients
from adclr.training.methods import Method
from adclr.training.plan_cost import allows_cuda_graph


class Step:
    """`losses, ok = step(views of each micro-batch, values)`: forward, backward, optimizer, teacher and centers.

    On a GPU a step of one micro-batch in one process is recorded as a CUDA graph, compiled or not, unless
    `train.cuda_graph=off` or `record` is false. A graph has fixed sizes, so Sinkhorn's targets of masked patches, whose
    number varies, are not recorded.
    """

    def __init__(
        self,
        settings: Settings,
        method: Method,
        optimizer: torch.optim.AdamW,
        device: torch.device,
        dtype: torch.dtype | None,  # of autocast
        accumulate: int = 1,  # micro-batches of a step
        record: bool = True,
    ) -> None:
        self.method, self.optimizer, self.accumulate = method, optimizer, accumulate
        self.device, self.dtype, self.clip_norm = device, dtype, settings.optim.clip_norm
        one_process, self.sharded = not distributed.in_group(), isinstance(optimizer, ShardedAdamW)
        self.model = method if one_process or self.sharded else _data_parallel(method, settings)
        self.record = record and allows_cuda_graph(settings) and one_process and device.type == "cuda"
        self.record = self.record and accumulate == 1
        self.graphs: dict[tuple[object, ...], RecordedStep] = {}  # by what is frozen, and the number of masked patches

    def __call__(self, views: Iterable[Views], values: schedules.Values) -> tuple[Tensor, Tensor]:
        """Return the losses in the order of `Meter.names`, mean over micro-batches, and whether the step was good."""
        if self.record:
            (batch,) = views
            graph = self._graph(batch, values)
            if graph is not None:
                losses, ok = graph(batch, _numbers(values))
                return losses, ok
            views = [batch]
        if self.device.type != "cuda":
            return self._run(views, _numbers(values), _frozen(values))
        # unrecorded too, a GPU takes the values as float32 tensors, so that both ways round equally: to the bit
        return self._run(views, send(np.array(_numbers(values), np.float32), self.device), _frozen(values))

    def _graph(self, views: Views, values: schedules.Values) -> RecordedStep | None:
        """Return the graph for such views, recorded on first use; None if recording fails, which ends recording."""
        frozen = _frozen(values)
        kind = *frozen, views.masks and len(views.masks.index)
        if kind not in self.graphs:
            self.graphs.clear()  # first, since each holds the memory of a step
            # a temperature that is not a number makes a loss that is not, and such a step changes nothing
            void = schedules.Values(0.0, 0.0, 1.0, float("nan"), *frozen)
            try:
                self.graphs[kind] = RecordedStep(lambda v, n: self._run([v], n, frozen), views, _numbers(void))
            except (torch.OutOfMemoryError, UserError):
                raise
            except Exception as error:  # before anything was recorded
                torch.cuda.synchronize(self.device)
                self.record = False
                self.method.forget()
                reason = one_line(error)
                print(f"the step could not be recorded as a CUDA graph, so it is slower ({reason})", file=sys.stderr)
        return self.graphs.get(kind)

    def _run(
        self, views: Iterable[Views], numbers: tuple[float, ...] | Tensor, frozen: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor]:
        """Take the step, kernel by kernel; `numbers` are those of `_numbers`, on a GPU as a tensor."""
        lr, weight_decay, momentum, temperature, query_temperature = numbers
        losses = self.accumulate_gradients(views, temperature, query_temperature)
        student, (freeze_last_layer, freeze_backbone) = self.method.student, frozen
        frozen_parameters: list[nn.Parameter] = []
        if freeze_last_layer and isinstance(student, Branch):
            frozen_parameters += [p for head in student.heads for p in head.last_layer.parameters()]
        for parameter in [*frozen_parameters, *(student.backbone.parameters() if freeze_backbone else ())]:
            parameter.grad = None  # without a gradient it is not decayed either
        if isinstance(self.optimizer, ShardedAdamW):
            self.optimizer.take_gradients()
        ok = optim.optimizer_step(self.optimizer, lr, weight_decay, self.clip_norm, losses[0], self.sharded)
        self.optimizer.zero_grad(set_to_none=True)
        self.method.update(momentum, ok, head_only=freeze_backbone)
        return losses, ok

    def accumulate_gradients(
        self, views: Iterable[Views], teacher_temperature: float | Tensor, query_temperature: float | Tensor
    ) -> Tensor:
        """Run forward and backward over the micro-batches; return the mean losses.

        Views are taken one by one, so that few are in memory.
        """
        model, sums = self.model, torch.zeros((), device=self.device)
        for number, batch in enumerate(views):
            last = number == self.accumulate - 1
            if self.sharded:
                assert isinstance(self.method, ADCLR)
                sync_gradients(self.method, last)
            with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext():
                with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
                    losses = model(batch, teacher_temperature, query_temperature)
                (losses.total / self.accumulate).backward()
            sums = sums + torch.stack([loss.detach() for loss in losses]) / self.accumulate
        return sums


def _numbers(values: schedules.Values) -> tuple[float, ...]:
    """Return the values that a device takes as numbers: all but those that decide what is computed."""
    temperature, query_temperature = values.teacher_temperature, values.query_temperature
    query_temperature = temperature if query_temperature is None else query_temperature
    return values.lr, values.weight_decay, values.momentum, temperature, query_temperature


def _frozen(values: schedules.Values) -> tuple[bool, bool]:
    """Return whether the head's last layer and the backbone are frozen, which decides what is computed."""
    return values.freeze_last_layer, values.freeze_backbone


def _data_parallel(method: Method, settings: Settings) -> DistributedDataParallel:
    model = DistributedDataParallel(method)
    if settings.train.reduce_precision == "bfloat16":
        model.register_comm_hook(None, bf16_compress_hook)
    return model


def time_calls(
    work: Callable[[], object], device: torch.device, count: int, repeats: int = 1, warmup: int = 0
) -> list[float]:
    """Return the seconds of one call, the mean of `count` in a row, for each repeat, after `warmup` calls."""
    for _ in range(warmup):
        work()
    if warmup and device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = []
    for _ in range(repeats):
        if device.type == "cuda":  # by the GPU's clock: the host runs ahead of it
            first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            first.record()
            for _ in range(count):
                work()
            last.record()
            last.synchronize()
            seconds.append(first.elapsed_time(last) / 1000 / count)
        else:
            started = time.perf_counter()
            for _ in range(count):
                work()
            seconds.append((time.perf_counter() - started) / count)
    return seconds
