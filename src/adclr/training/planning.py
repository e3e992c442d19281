"""What a run will need before it is started: memory, time and disk, and the batch that fits.

Measured where the run would go: the micro-batch is fitted and a few real steps are timed, on views of noise. For a
GPU that is not here a model answers: the memory of `cost.gpu_memory`, and the time of `stated_seconds`. Probes are not
in either. A GPU makes views beside its steps, so that of the data path only decoding is looked at. On a CPU steps,
views and decoding take turns on the same cores, so that the time of an image is the sum of theirs.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from adclr.config import auto, sections
from adclr.config.sections import UserError
from adclr.config.settings import Settings
from adclr.data import collection
from adclr.data.collection import open_source
from adclr.data.decode import Pixels, Unreadable
from adclr.data.sources import Source
from adclr.system import machine, outputs
from adclr.system.files import check_writable, write_json
from adclr.system.runs import provenance
from adclr.system.text import format_size, printable_lines
from adclr.system.threads import Workers
from adclr.training import launch, plan_cost
from adclr.training.plan_gpus import Gpu
from adclr.training.plan_text import LONG_SECONDS, describe, long_run

# The step of a GPU, fitted to the H200 of docs/performance.md. Matrix products grow with the square of the width, all
# else with the width: the time is that of the arithmetic at the maker's peak, times BEST + PER_WIDTH / width. Then the
# update and whatever else does not depend on the batch: ViT-S and ViT-B have the same, from two batch sizes each.
BEST, PER_WIDTH = 1.5, 543.0
UPDATE_SECONDS = 0.0063
UNCOMPILED = 1.013  # times as long
# A block of a micro-batch that is not recorded, launched kernel by kernel by one CPU thread: 73 to 90 ms for 12 blocks.
LAUNCH_SECONDS = 0.0068
GIB, GB = 2**30, 1e9
ASSUMED_SIDE = 256  # pixels of images of which only the number is known
NAME_BYTES = 64  # of the index, for each of such images
DECODE_SECONDS, DECODE_BATCH, DECODE_BATCHES = 2.0, 16, 64  # that decoding is timed, at most
VIEWED = 8  # images whose views are timed


@dataclass(frozen=True)
class Device:
    """What one device can do."""

    basis: str  # where the numbers are from, in words
    measured: bool
    on_gpu: bool
    gib: float
    room: float  # bytes for images, when all that does not depend on the batch is there
    fixed: float  # bytes
    each: float  # bytes for each image
    micro_batch: int
    images_per_second: float


@dataclass(frozen=True)
class Sample:
    """What a few images of the collection say of all."""

    bytes: float  # decoded
    place: Literal["ram", "gpu"] | None  # where data.cache keeps them
    images_per_second: float  # read and decoded, by all threads and the GPU where it decodes
    threads: int
    images: list[Pixels]  # some of them


def run(
    data: str | None,
    images: int | None = None,
    recipe: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    gpu: Gpu | None = None,  # one that is not here; None: measured on what is
    num_gpus: int = 1,
    out: Path | None = None,
    file: Path | None = None,
    overwrite: bool = False,  # a file that is no plan
) -> dict[str, Any]:
    """Prints the plan, writes it as JSON to `file`, returns it."""
    if machine.num_processes() > 1:
        raise UserError("a plan is made by one process; leave out torchrun and say --gpus")
    for path in (out, file):
        if path is not None:
            check_writable(path)
    if file is not None:
        outputs.check("plan", [file], overwrite, remedy=outputs.REMEDY.replace("--out", "--json"))
    settings, source, reasons = _settle(data, images, recipe, dict(overrides or {}), gpu, out)
    count = len(source) if source is not None else images or 0
    local = _local_batch(settings, count, num_gpus)
    if gpu is None and num_gpus > 1 and machine.gpu_bytes(settings.train.device) is None:
        raise UserError(f"--gpus {num_gpus} was said but there is no GPU here to measure; say which as --gpu NAME")
    sample = _sample(source, settings, gpu) if source is not None else None
    filled = sample.bytes if sample and sample.place == "gpu" else 0.0
    device = _stated(settings, local, num_gpus, gpu, filled) if gpu else _measured(settings, local, num_gpus, filled)
    views = None if device.on_gpu else _views_per_second(settings, sample)
    plan = _report(settings, source, count, num_gpus, device, sample, views, out)
    print(printable_lines("\n".join([*reasons, *describe(plan)])))
    if file is not None:
        facts = {"settings": settings.model_dump(mode="json"), "provenance": provenance() | outputs.signature("plan")}
        write_json(file, plan | {"reasons": reasons} | facts)
        print(f"\nwritten to {file}")
    return plan


def _settle(
    data: str | None,
    images: int | None,
    recipe: str | None,
    overrides: dict[str, Any],
    gpu: Gpu | None,
    out: Path | None,
) -> tuple[Settings, Source | None, list[str]]:
    """Settings and collection as `adclr pretrain` would have them, and the reasons of an automatic choice."""
    if "recipe" in overrides:
        raise UserError(f"a recipe is not a setting; write --recipe {overrides['recipe']}")
    if data is not None:
        if {"path", "data.path"} & set(overrides):
            raise UserError(f"images were named twice, as {data} and by data.path; leave out one of them")
        overrides["data.path"] = data
    named = recipe if recipe != "auto" else None
    base = sections.recipe(named) | {"recipe": named} if named else {}
    overrides, adopted = launch.adopted(base, overrides)
    settings = launch.settle(base, overrides)
    path = settings.data.path
    if bool(path) == (images is not None):
        raise UserError(
            f"give the images, or their number as --images N; {'not both' if path else 'neither was given'}"
        )
    if gpu and settings.train.precision == "float32":
        raise UserError("the model of a GPU is of bfloat16; leave out train.precision=float32, or --gpu to measure")
    index, allowed = out / launch.INDEX if out is not None else None, settings.data.allow_damaged_shards
    source = open_source(path, index, allowed) if path else None
    if named is not None:
        return settings, source, adopted
    memory = int(gpu.gib * GIB) if gpu else machine.gpu_bytes(settings.train.device)
    told = []
    if source is None:
        told = [f"the images are taken to be of {ASSUMED_SIDE} pixels; name them, or a --recipe, to know better"]
    side = ASSUMED_SIDE if source is None else collection.median_side(source)
    choice = auto.choose(images or 0 if source is None else len(source), side, memory)
    return launch.settle(launch.choice_settings(choice), overrides), source, told + choice.reasons + adopted


def _local_batch(settings: Settings, count: int, num_gpus: int) -> int:
    """Images of a step on each GPU."""
    batch, micro = settings.train.batch_size, settings.train.micro_batch_size
    if count < batch:
        raise UserError(
            f"{count} images are fewer than train.batch_size={batch}; "
            f"set train.batch_size={2 ** (count.bit_length() - 1)} or less"
        )
    if batch % num_gpus:
        raise UserError(f"train.batch_size={batch} does not divide over {num_gpus} GPUs; choose a multiple of them")
    if micro and (batch // num_gpus) % micro:
        raise UserError(
            f"train.micro_batch_size={micro} does not divide the {batch // num_gpus} images of each of {num_gpus} GPUs"
        )
    return batch // num_gpus


def _sample(source: Source, settings: Settings, gpu: Gpu | None) -> Sample:
    """Decodes a few images, as the cache does to guess the size of all, and then times it, as training decodes."""
    from adclr.data import cache
    from adclr.data.feed import Feed
    from adclr.data.nvjpeg import GpuDecoder
    from adclr.system import devices, machine
    from adclr.training import job

    decoder, workers = job.decoder(settings), settings.data.num_workers
    threads = max(1, machine.cpu_share() if workers is None else workers)
    images: list[Pixels] = []

    def read(index: int) -> Pixels | None:
        try:
            pixels = decoder(source.read(index))
        except (Unreadable, OSError):
            return None
        if len(images) < VIEWED:
            images.append(pixels)
        return pixels

    with Workers(threads, "plan") as pool:
        size = cache.guess(read, len(source), pool)
    if not size:
        raise UserError(f"none of the images of {source.root} that were tried can be read; are they images?")
    if gpu is not None:
        free = gpu.gib * GIB
    else:
        device = devices.choose(settings.train.device)
        free = machine.available(device) if device.type == "cuda" else 0.0
    if gpu is None and GpuDecoder.suits(device):
        rate = Feed(source, threads, decoder, pin=free > 0, gpu_decoder=GpuDecoder(decoder, device)).rate()
    else:
        rate = Feed(source, threads, decoder).rate(DECODE_BATCH, DECODE_BATCHES, DECODE_SECONDS)
    mode = settings.data.cache
    if mode == "gpu" and not free:
        raise UserError("data.cache=gpu was asked for but the run is not on a GPU; set data.cache=ram or auto")
    where = None if mode == "off" else cache.place(mode, size, cache.Room(machine.host_memory(), free))
    return Sample(size, where, rate, threads, images)


def _views_per_second(settings: Settings, sample: Sample | None) -> float:
    """Images/s of the views on a CPU; of noise where there are no images."""
    from adclr.training import plan_trial

    if sample is not None:
        return plan_trial.time_views(settings, sample.images)
    side, channels = min(ASSUMED_SIDE, settings.data.max_side or ASSUMED_SIDE), settings.model.num_channels
    noise = np.random.default_rng(0).integers(0, 256, (VIEWED, channels, side, side), np.uint8)
    return plan_trial.time_views(settings, list(noise))


def stated_seconds(settings: Settings, gpu: Gpu, local_batch: int, micro_batch: int, num_gpus: int = 1) -> float:
    """The time of a step on a GPU that is not here, by the model."""
    dim, depth, _ = settings.model.shape
    counted = plan_cost.flops(settings)
    each = (counted.step + counted.again) / (gpu.tflops * 1e12) * (BEST + PER_WIDTH / dim)
    if settings.train.compile == "off" or settings.train.shard:
        each *= UNCOMPILED
    spent, accumulate = UPDATE_SECONDS + local_batch * each, local_batch // micro_batch
    if plan_cost.allows_cuda_graph(settings) and accumulate == 1 and num_gpus == 1:
        return spent
    return max(spent, accumulate * depth * LAUNCH_SECONDS)  # whichever of GPU and CPU waits for the other


def _stated(settings: Settings, local_batch: int, num_gpus: int, gpu: Gpu, filled: float) -> Device:
    """A GPU that is not here, by the model."""
    from adclr.training.micro_batch import GPU_SHARE, largest_divisor

    fixed, each = plan_cost.gpu_memory(settings)
    room = GPU_SHARE * (gpu.gib * GIB - filled) - fixed
    micro = settings.train.micro_batch_size or largest_divisor(local_batch, each, room)
    rate = local_batch / stated_seconds(settings, gpu, local_batch, micro, num_gpus)
    share = rate * plan_cost.flops(settings).step / (gpu.tflops * 1e12)
    basis = (
        f"ESTIMATED, not measured, for {gpu.name} of {gpu.gib:.0f} GiB and {gpu.tflops:.0f} TFLOP/s in bfloat16, of "
        f"which {share:.0%} are taken to be reached; without --gpu, on that GPU, it is measured"
    )
    return Device(basis, False, True, gpu.gib, room, fixed, each, micro, rate)


def _measured(settings: Settings, local_batch: int, num_gpus: int, filled: float) -> Device:
    """The device that is here, by a few steps as training will take them: as many micro-batches, recorded or not."""
    import torch

    from adclr.system import devices, machine
    from adclr.training import job, plan_trial
    from adclr.training.micro_batch import CPU_SHARE, GPU_SHARE, estimate_image_bytes, largest_divisor, measure_memory

    device = devices.choose(settings.train.device)
    dtype = devices.autocast_dtype(settings.train.precision, device)
    method = job.build(settings).to(device)
    gpu = device.type == "cuda"
    if gpu:
        fixed, each = measure_memory(method, settings, device, dtype)
        whole = machine.available(device)
        room = GPU_SHARE * (whole - filled) - fixed
    else:  # weights, gradients, two moments and the teacher, in float32
        fixed, each = 20.0 * plan_cost.parameters(settings).all, estimate_image_bytes(settings)
        whole = machine.host_memory()
        room = CPU_SHARE * whole
    micro = settings.train.micro_batch_size or largest_divisor(local_batch, each, room)
    timed = None
    with suppress(torch.OutOfMemoryError):
        timed = plan_trial.time_steps(method, settings, device, dtype, local_batch, micro, num_gpus)
    if timed is None:  # here no traceback holds on to memory
        raise UserError(
            f"{micro} images at once do not fit into {whole / GIB:.1f} GiB; "
            f"set train.micro_batch_size={largest_divisor(local_batch, each, room, max(1, micro // 2))}"
        )
    name = torch.cuda.get_device_name(device) if gpu else f"the {machine.cpu_count()} CPU cores of this machine"
    images = f"{timed.accumulate} × {timed.micro_batch}" if timed.accumulate > 1 else f"{timed.micro_batch}"
    basis = f"measured on {name}, {whole / GIB:.1f} GiB free, by steps of {images} images of noise"
    if not gpu:
        if timed.slowdown > 1.2:
            basis += f", as if they were free: beside what runs there now it takes {timed.slowdown:.1f} times as long"
        basis += "; it has no GPU, or was told not to use it: --gpu h200 says what one would do"
    return Device(basis, True, gpu, whole / GIB, room, fixed, each, micro, timed.images_per_second)


def _report(
    settings: Settings,
    source: Source | None,
    count: int,
    num_gpus: int,
    device: Device,
    sample: Sample | None,
    views: float | None,  # images/s, where they are made by the cores that also do the steps
    out: Path | None,
) -> dict[str, Any]:
    batch, epochs = settings.train.batch_size, settings.train.epochs
    steps, fits = epochs * (count // batch), int(device.room / device.each)
    rate, warnings = num_gpus * device.images_per_second, []
    if device.micro_batch > fits:
        warnings.append(f"train.micro_batch_size={device.micro_batch} does not fit: at most {max(0, fits)} images do")
    decoded = sample.images_per_second if sample and not sample.place else None  # in every epoch
    if views is not None:
        rate = 1 / (1 / rate + 1 / views + (1 / decoded if decoded else 0))
    elif device.measured and decoded:  # of another machine nothing is known
        if decoded < rate:
            warnings.append(
                f"images are decoded more slowly ({decoded:.0f}/s) than the step takes them ({rate:.0f}/s), so the "
                "time is theirs; smaller files or data.max_side help"
            )
        rate = min(rate, decoded)
    hours = steps * batch / rate / 3600
    if 3600 * hours > LONG_SECONDS:
        warnings.append(long_run(3600 * hours, device.on_gpu))
    disk = _disk(settings, source, count, steps)
    disk["free_gb"] = None if out is None else _free(out) / GB
    if out is not None and disk["free_gb"] < disk["total_gb"]:
        warnings.append(f"{out} has room for {format_size(disk['free_gb'])}, less than is needed; choose another --out")
    parameters = plan_cost.parameters(settings)
    return {
        "data": settings.data.path or None,
        "images": count,
        "recipe": settings.recipe,
        "epochs": epochs,
        "batch_size": batch,
        "steps": steps,
        "gpus": num_gpus,
        "basis": device.basis,
        "measured": device.measured,
        "parameters": {"backbone": parameters.backbone, "head": parameters.head},
        "memory": {
            "gib": device.gib,
            "fixed_gib": device.fixed / GIB,
            "image_gib": device.each / GIB,
            "images_that_fit": fits,
            "micro_batch_size": device.micro_batch,
            "accumulate": batch // num_gpus // device.micro_batch,
            "needed_gib": (device.fixed + device.micro_batch * device.each) / GIB,
        },
        "time": {
            "gflop_per_image": plan_cost.flops(settings).step / 1e9,
            "images_per_second": rate,
            "steps_images_per_second": num_gpus * device.images_per_second,
            "views_images_per_second": views,  # where they take turns with the steps
            "hours": hours,
            "seconds_per_epoch": hours * 3600 / epochs,
        },
        "disk": disk,
        "decoded": sample
        and {
            "gib": sample.bytes / GIB,
            "kept": sample.place,
            "images_per_second": sample.images_per_second,
            "threads": sample.threads,
        },
        "warnings": warnings,
    }


def _disk(settings: Settings, source: Source | None, count: int, steps: int) -> dict[str, Any]:
    """GB of the files of a run; while a checkpoint is written there is one more than are kept."""
    stamps = 24 * count  # a key, a size and a time of each image
    index = NAME_BYTES * count
    if source is not None:
        index, found = 0, source.listing  # a list or a data set is its own index
        if found is not None:
            index = sum(len(name.encode("utf-8", "surrogateescape")) + 1 for name in (*found.names, *found.labels))
            index += found.places.nbytes + 100 * len(found.facts)
    one, backbone = plan_cost.checkpoint_bytes(settings), plan_cost.backbone_bytes(settings)
    logs, checkpoints = plan_cost.log_bytes(settings, steps), settings.train.keep_checkpoints + 1
    return {
        "checkpoint_gb": one / GB,
        "checkpoints": checkpoints,
        "backbone_gb": backbone / GB,
        "logs_gb": logs / GB,
        "index_gb": (index + stamps) / GB,
        "total_gb": (checkpoints * one + backbone + logs + index + stamps) / GB,
    }


def _free(path: Path) -> float:
    """Bytes left where a path would be made."""
    while not path.exists():
        path = path.parent
    return float(shutil.disk_usage(path).free)
