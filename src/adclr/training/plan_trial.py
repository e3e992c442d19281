"""Measurements for a plan: steps as training takes them, decoding, and on a CPU the rendering of views.

Everything runs once before it is timed: the first time includes starting threads, allocating memory and compiling.

On a CPU other processes may use the cores while a plan is measured, and not while the run trains. So times are those of
free cores: Linux counts how long runnable threads waited for a core, and that is subtracted. Without this, one run was
planned for 18.8 hours on a quiet machine and for 23.4 days on a busy one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.data import augment, cache
from adclr.data.decode import Pixels, Unreadable
from adclr.data.feed import Feed
from adclr.data.nvjpeg import GpuDecoder
from adclr.data.packed import pack
from adclr.data.sources import Source
from adclr.data.view_plan import plan_batch
from adclr.system import devices, machine
from adclr.system.threads import ThreadPool
from adclr.training import plan_cost, schedules
from adclr.training.job import compile_method
from adclr.training.job import decoder as make_decoder
from adclr.training.methods import Method
from adclr.training.micro_batch import random_views
from adclr.training.plan_gpus import ASSUMED_SIDE, Gpu
from adclr.training.step import Step, time_calls

GPU_WARMUP, GPU_STEPS, GPU_REPEATS = 3, 2, 3  # on a GPU the median of 3 times 2 steps is taken
# On a CPU the median of 3 steps of the whole batch, or of as many images as take about 3 seconds: 2 of a model that
# takes seconds for each. With 2 images the update, whose time does not depend on them, would count 32 times as much as
# in batches of 64.
CPU_STEPS, CPU_STEP_SECONDS, CPU_MIN_IMAGES, CPU_MAX_IMAGES = 3, 3.0, 2, 64
CPU_MAX_SECONDS = 30.0  # of a step, however busy the machine is
VIEW_SECONDS = 1.0
DECODE_SECONDS, DECODE_BATCH, DECODE_BATCHES = 2.0, 16, 64  # that decoding is timed, at most
NUM_VIEWED = 8  # images whose views are timed
TASKS = Path("/proc/self/task")  # of each thread: nanoseconds that it ran, and that it waited for a core


@dataclass(frozen=True)
class Sample:
    """Estimates for the whole collection from a few of its images."""

    bytes: float  # decoded
    cache: Literal["ram", "gpu"] | None  # where data.cache keeps them
    images_per_second: float  # read and decoded, by all threads and the GPU where it decodes
    threads: int
    images: list[Pixels]  # some of them


class StepTime(NamedTuple):
    """The speed of steps and the batch it was measured with."""

    images_per_second: float
    accumulate: int  # micro-batches of the step
    micro_batch: int  # images of each
    slowdown: float = 1.0  # by other processes on this machine


def _cpu_seconds(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the median of the time that work takes on free cores, and of the time it took."""
    free, durations = [], []
    for _ in range(repeats):
        started, used, waited = time.perf_counter(), time.process_time(), _seconds_waited()
        work()
        durations.append(time.perf_counter() - started)
        used, waited = time.process_time() - used, _seconds_waited() - waited
        # waits of several threads overlap, so that the difference can be too small, but not this small
        free.append(max(durations[-1] - waited, used / torch.get_num_threads()) if waited else durations[-1])
    return statistics.median(free), statistics.median(durations)


def _seconds_waited() -> float:
    """Return how long the threads of this process have waited for a core; 0 where the system does not count it."""
    try:
        return sum(int((task / "schedstat").read_text().split()[1]) for task in TASKS.iterdir()) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class _StepMaker:
    """Makes steps of one method on views of noise."""

    def __init__(
        self,
        method: Method,
        settings: Settings,
        device: torch.device,
        dtype: torch.dtype | None,
        micro_batch: int,
        total_steps: int,
    ) -> None:
        self.method, self.settings, self.device, self.dtype = method, settings, device, dtype
        compile_method(method, settings, device, dtype, micro_batch, total_steps)
        self.optimizer = schedules.make_optimizer(method.student, settings)
        self.values = schedules.Values(1e-4, 0.04, 0.99, settings.method.teacher_temperature, freeze_last_layer=False)

    def make(self, accumulate: int, micro_batch: int, record: bool, warmup: int) -> Callable[[], object]:
        """Return a function that takes a step, after `warmup` steps."""
        hidden = round(plan_cost.hidden_patches(self.settings))
        views = [random_views(self.settings, micro_batch, self.device, hidden)] * accumulate
        step = Step(self.settings, self.method, self.optimizer, self.device, self.dtype, accumulate, record)
        for _ in range(warmup):
            step(views, self.values)
        return lambda: step(views, self.values)


def time_steps(
    method: Method,
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype | None,
    local_batch: int,
    micro_batch: int,
    num_gpus: int,
    total_steps: int,
) -> StepTime:
    """Time steps of `local_batch` images in micro-batches; on a CPU of fewer images where they take too long."""
    if device.type == "cuda":
        accumulate = local_batch // micro_batch
        steps = _StepMaker(method, settings, device, dtype, micro_batch, total_steps)
        step = steps.make(accumulate, micro_batch, num_gpus == 1, GPU_WARMUP)
        spent = statistics.median(time_calls(step, device, GPU_STEPS, GPU_REPEATS))
        return StepTime(local_batch / spent, accumulate, micro_batch)

    def split(images: int) -> tuple[int, int]:
        """Return the number of micro-batches, and the images of each."""
        return max(1, images // micro_batch), min(micro_batch, images)

    num_images = min(local_batch, CPU_MIN_IMAGES)
    steps = _StepMaker(method, settings, device, dtype, split(num_images)[1], total_steps)
    free, spent = _cpu_seconds(steps.make(*split(num_images), False, warmup=1), 1)
    # by the time on free cores, so that a busy machine does not change what is measured, but how long that takes
    seconds = max(free, spent * CPU_STEP_SECONDS / CPU_MAX_SECONDS)
    images = max(num_images, min(local_batch, CPU_MAX_IMAGES, int(CPU_STEP_SECONDS * num_images / seconds)))
    accumulate, micro = split(images)
    free, spent = _cpu_seconds(steps.make(accumulate, micro, False, warmup=1), CPU_STEPS)
    return StepTime(accumulate * micro / free, accumulate, micro, spent / free)


def time_views(settings: Settings, sample: Sample | None) -> float:
    """Return the images/s of rendering views on a CPU; of noise where there are no images."""
    if sample is not None:
        images = sample.images
    else:
        side, channels = min(ASSUMED_SIDE, settings.data.max_side or ASSUMED_SIDE), settings.model.num_channels
        images = list(np.random.default_rng(0).integers(0, 256, (NUM_VIEWED, channels, side, side), np.uint8))
    packed, keys = pack(images), np.arange(len(images), dtype=np.uint64)
    mean, std = settings.data.mean, settings.data.std

    def render(epoch: int) -> None:
        augment.render(packed, plan_batch(settings, epoch, keys, packed.sizes), mean, std)

    render(0)
    _, seconds = _cpu_seconds(lambda: render(1), 1)
    free, _ = _cpu_seconds(lambda: render(2), max(1, min(50, int(VIEW_SECONDS / seconds))))
    return len(images) / free


def sample_images(source: Source, settings: Settings, gpu: Gpu | None) -> Sample:
    """Decode a few images to estimate the size of all, and time decoding as training does it."""
    decoder, workers = make_decoder(settings), settings.data.num_workers
    threads = max(1, machine.cpu_share() if workers is None else workers)
    images: list[Pixels] = []

    def read(index: int) -> Pixels | None:
        try:
            pixels = decoder(source.read(index))
        except (Unreadable, OSError):
            return None
        if len(images) < NUM_VIEWED:
            images.append(pixels)
        return pixels

    with ThreadPool(threads, "plan") as pool:
        size = cache.estimate_bytes(read, len(source), pool)
    if not size:
        raise UserError(f"none of the images of {source.root} that were tried can be read; are they images?")
    if gpu is not None:
        free = gpu.gib * machine.GIB
    else:
        device = devices.select_device(settings.train.device)
        free = machine.available_gpu_memory(device) if device.type == "cuda" else 0.0
    if gpu is None and GpuDecoder.suits(device):
        rate = Feed(source, threads, decoder, pin=free > 0, gpu_decoder=GpuDecoder(decoder, device)).rate()
    else:
        rate = Feed(source, threads, decoder).rate(DECODE_BATCH, DECODE_BATCHES, DECODE_SECONDS)
    mode = settings.data.cache
    if mode == "gpu" and not free:
        raise UserError("data.cache=gpu was asked for but the run is not on a GPU; set data.cache=ram or auto")
    location = (
        None if mode == "off" else cache.choose_location(mode, size, cache.FreeMemory(machine.host_memory(), free))
    )
    return Sample(size, location, rate, threads, images)
