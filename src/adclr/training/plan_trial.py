"""Times what a training run does, for a plan: steps, as training takes them, and on a CPU the views they take.

Everything is done before it is timed: the first time pays for threads, memory and what is compiled, as a run does once.

On a CPU other processes may use the cores while a plan is made, and not while the run goes on. So a time is that of
free cores: Linux counts how long threads that could run had to wait for one, and that is left out. Before, one run was
planned for 18.8 hours on a quiet machine and for 23.4 days on a busy one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from adclr.config.settings import Settings
from adclr.data import augment
from adclr.data.decode import Pixels
from adclr.data.views import plan
from adclr.model.method import ADCLR
from adclr.training import plan_cost, schedules
from adclr.training.job import compile_method
from adclr.training.micro_batch import random_views
from adclr.training.step import Step, time_calls

GPU_WARM, GPU_STEPS, GPU_REPEATS = 3, 2, 3  # on a GPU the median of 3 times 2 steps is taken
# On a CPU the median of 3 steps of the whole batch, or of as many images as take about 3 seconds: 2 of a model that
# takes seconds for each. With 2 images the update, whose time does not depend on them, would count 32 times as much as
# in batches of 64.
CPU_STEPS, CPU_STEP_SECONDS, CPU_FEWEST, CPU_MOST = 3, 3.0, 2, 64
VIEW_SECONDS = 1.0
TASKS = Path("/proc/self/task")  # of each thread: nanoseconds that it ran, and that it waited for a core


class Timed(NamedTuple):
    images_per_second: float
    accumulate: int  # micro-batches of the step
    micro_batch: int  # images of each
    slowdown: float = 1.0  # beside what else runs here


def cpu_seconds(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Medians of the time that work takes on free cores, and of the time it took."""
    free, taken = [], []
    for _ in range(repeats):
        started, used, waited = time.perf_counter(), time.process_time(), _waited()
        work()
        taken.append(time.perf_counter() - started)
        used, waited = time.process_time() - used, _waited() - waited
        # waits of several threads overlap, so that the difference can be too small, but not this small
        free.append(max(taken[-1] - waited, used / torch.get_num_threads()) if waited else taken[-1])
    return statistics.median(free), statistics.median(taken)


def _waited() -> float:
    """Seconds that the threads of this process have waited for a core; 0 where the system does not count them."""
    try:
        return sum(int((task / "schedstat").read_text().split()[1]) for task in TASKS.iterdir()) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Steps:
    """Steps of one method on views of noise."""

    def __init__(
        self, method: ADCLR, settings: Settings, device: torch.device, dtype: torch.dtype | None, micro_batch: int
    ) -> None:
        self.method, self.settings, self.device, self.dtype = method, settings, device, dtype
        compile_method(method, settings, device, dtype, micro_batch)
        self.optimizer = schedules.make_optimizer(method.student, settings)
        self.values = schedules.Values(1e-4, 0.04, 0.99, settings.method.teacher_temperature, freeze_last_layer=False)

    def ready(self, accumulate: int, micro_batch: int, record: bool, warm: int) -> Callable[[], object]:
        """A step that can be taken again and again, and was taken `warm` times."""
        hidden = round(plan_cost.hidden_patches(self.settings))
        views = [random_views(self.settings, micro_batch, self.device, hidden)] * accumulate
        step = Step(self.settings, self.method, self.optimizer, self.device, self.dtype, accumulate, record)
        for _ in range(warm):
            step(views, self.values)
        return lambda: step(views, self.values)


def time_steps(
    method: ADCLR,
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype | None,
    local_batch: int,
    micro_batch: int,
    num_gpus: int,
) -> Timed:
    """Times steps of `local_batch` images in micro-batches; on a CPU of fewer images where they take too long."""
    if device.type == "cuda":
        steps, accumulate = Steps(method, settings, device, dtype, micro_batch), local_batch // micro_batch
        step = steps.ready(accumulate, micro_batch, num_gpus == 1, GPU_WARM)
        spent = statistics.median(time_calls(step, device, GPU_STEPS, GPU_REPEATS))
        return Timed(local_batch / spent, accumulate, micro_batch)

    def divided(images: int) -> tuple[int, int]:
        """(micro-batches, images of each)"""
        return max(1, images // micro_batch), min(micro_batch, images)

    few = min(local_batch, CPU_FEWEST)
    steps = Steps(method, settings, device, dtype, divided(few)[1])
    _, spent = cpu_seconds(steps.ready(*divided(few), False, warm=1), 1)
    images = max(few, min(local_batch, CPU_MOST, int(CPU_STEP_SECONDS * few / spent)))
    accumulate, micro = divided(images)
    free, spent = cpu_seconds(steps.ready(accumulate, micro, False, warm=1), CPU_STEPS)
    return Timed(accumulate * micro / free, accumulate, micro, spent / free)


def time_views(settings: Settings, images: Sequence[Pixels]) -> float:
    """Times the views of decoded images on a CPU; images/s."""
    packed, keys = augment.pack(list(images)), np.arange(len(images), dtype=np.uint64)
    mean, std = settings.data.mean, settings.data.std

    def render(epoch: int) -> None:
        augment.render(packed, plan(settings, epoch, keys, packed.sizes), mean, std)

    render(0)
    _, once = cpu_seconds(lambda: render(1), 1)
    free, _ = cpu_seconds(lambda: render(2), max(1, min(50, int(VIEW_SECONDS / once))))
    return len(images) / free
