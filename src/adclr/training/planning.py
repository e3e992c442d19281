"""The plan of a run before it is started: its memory, time and disk space, and the batch that fits.

On the present machine the micro-batch is fitted and a few real steps are timed, on views of noise. For a GPU that is
not present both are estimated: memory by `plan_cost.gpu_memory`, time by `estimate_step_seconds`. Neither includes
probes. A GPU makes views in parallel with its steps, so of the data path only decoding counts. On a CPU steps, views
and decoding share the same cores, so the time of an image is the sum of theirs. The step of a distillation includes
the forward pass of its teacher (`plan_distillation`).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adclr.config import auto
from adclr.config.distillation import DEFAULT_RECIPE, DistillSettings
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.data import collection
from adclr.data.collection import open_source
from adclr.data.file_stamps import MOST_WATCHED, WATCHED
from adclr.data.sources import Source
from adclr.system import machine, outputs
from adclr.system.files import check_writable, write_json
from adclr.system.machine import GIB
from adclr.system.runs import provenance
from adclr.system.stores import cache as store_cache
from adclr.system.text import format_size, printable, printable_lines
from adclr.training import launch, plan_cost
from adclr.training.plan_cost import Cost
from adclr.training.plan_gpus import ASSUMED_SIDE, Gpu
from adclr.training.plan_text import describe

if TYPE_CHECKING:
    from adclr.training.methods import Method
    from adclr.training.plan_trial import Sample

# The step of a GPU, fitted to the H200 of docs/performance.md. Matrix products grow with the square of the width, all
# else with the width: the time is that of the arithmetic at peak speed, times BEST + PER_WIDTH / width. Then the update
# and whatever else does not depend on the batch: ViT-S and ViT-B have the same, from two batch sizes each.
BEST, PER_WIDTH = 1.5, 543.0
UPDATE_SECONDS = 0.0063
UNCOMPILED = 1.013  # times as long
# A block of a micro-batch that is not recorded, launched kernel by kernel by one CPU thread: 73 to 90 ms for 12 blocks.
LAUNCH_SECONDS = 0.0068
GB = 1e9
NAME_BYTES = 64  # of the index, for each of such images


@dataclass(frozen=True)
class Device:
    """Memory and speed of one device."""

    basis: str  # where the numbers come from, in words
    measured: bool
    on_gpu: bool
    gib: float
    free_bytes: float  # for images, beside what does not depend on the batch
    fixed_bytes: float
    image_bytes: float  # for each image
    micro_batch: int
    images_per_second: float


def plan_run(
    data: str | None,
    images: int | None = None,
    recipe: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    gpu: Gpu | None = None,  # one that is not present; None: measured on the present device
    num_gpus: int = 1,
    out: Path | None = None,
    file: Path | None = None,
    overwrite: bool = False,  # a file that is no plan
    teacher: str | None = None,  # of a distillation
) -> dict[str, Any]:
    """Print the plan of a run, write it as JSON to `file`, and return it."""
    if machine.num_processes() > 1:
        raise UserError("a plan is made by one process; leave out torchrun and give --gpus")
    for path in (out, file):
        if path is not None:
            check_writable(path)
    if file is not None:
        outputs.check_overwrite("plan", [file], overwrite, remedy=outputs.REMEDY.replace("--out", "--json"))
    if teacher is None:
        settings, source, reasons = _settle(data, images, recipe, overrides, gpu, out)
    else:
        settings, source, reasons = _settle_distillation(teacher, data, images, recipe, overrides, gpu, out)
    count = len(source) if source is not None else images or 0
    if file is not None and source is not None:
        collection.check_apart(file, source, "--json", is_file=True)
    launch.check_batch(settings, count, num_gpus, "GPUs")
    local = settings.train.batch_size // num_gpus
    steps = settings.train.epochs * (count // settings.train.batch_size)
    if gpu is None and num_gpus > 1 and machine.gpu_bytes(settings.train.device) is None:
        raise UserError(
            f"--gpus {num_gpus} needs the kind of GPU, since this machine has none to measure; give --gpu NAME"
        )
    from adclr.training import plan_trial

    method, cost = _build(settings, gpu)
    sample = plan_trial.sample_images(source, settings, gpu) if source is not None else None
    cached = sample.bytes if sample and sample.cache == "gpu" else 0.0
    if gpu:
        device = estimate_device(settings, cost, local, num_gpus, gpu, cached, steps)
    else:
        device = _measure_device(settings, cost, method, local, num_gpus, cached, steps)
    views = None if device.on_gpu else plan_trial.time_views(settings, sample)
    plan = _report(settings, cost, source, count, num_gpus, device, sample, views, out)
    print(printable_lines("\n".join([*reasons, *describe(plan)])))
    if file is not None:
        facts = {"settings": settings.model_dump(mode="json"), "provenance": provenance() | outputs.signature("plan")}
        write_json(file, plan | {"reasons": reasons} | facts)
        print(f"\nwritten to {printable(str(file))}")
    return plan


def _settle(
    data: str | None,
    images: int | None,
    recipe: str | None,
    overrides: Mapping[str, Any] | None,
    gpu: Gpu | None,
    out: Path | None,
) -> tuple[Settings, Source | None, list[str]]:
    """Return settings and images as `adclr pretrain` would have them, and the reasons of an automatic choice."""
    overrides = launch.add_images(data, overrides)
    base = launch.recipe_settings(recipe)
    overrides, reasons = launch.adopt_init(base, overrides)
    settings = launch.resolve_settings(base, overrides)
    source = _open_images(settings, images, gpu, out)
    if base:
        return settings, source, reasons
    memory = int(gpu.gib * GIB) if gpu else machine.gpu_bytes(settings.train.device)
    if source is None:
        side = ASSUMED_SIDE
        assumed = [f"image size assumed: {side} pixels; give the images or a --recipe for a better plan"]
    else:
        side, assumed = collection.median_side(source), []
    choice = auto.choose(images or 0 if source is None else len(source), side, memory)
    return (
        launch.resolve_settings(launch.choice_settings(choice), overrides),
        source,
        assumed + choice.reasons + reasons,
    )


def _settle_distillation(
    teacher: str,
    data: str | None,
    images: int | None,
    recipe: str | None,
    overrides: Mapping[str, Any] | None,
    gpu: Gpu | None,
    out: Path | None,
) -> tuple[Settings, Source | None, list[str]]:
    """Return settings and images as `adclr distill` would have them, and what the teacher determines."""
    overrides = launch.add_images(data, overrides) | {"distill.teacher": teacher}
    base = launch.recipe_settings(recipe, DistillSettings) or launch.recipe_settings(DEFAULT_RECIPE, DistillSettings)
    overrides, reasons = launch.adopt_teacher(base, overrides, None)
    settings = launch.resolve_settings(base, overrides, DistillSettings)
    return settings, _open_images(settings, images, gpu, out), reasons


def _build(settings: Settings, gpu: Gpu | None) -> tuple[Method | None, Cost]:
    """Return the method, if it is measured or its cost cannot be told without it, and its cost."""
    if isinstance(settings, DistillSettings):
        from adclr.training import distillation, plan_distillation

        method = distillation.build(settings)
        cost = plan_distillation.describe_cost(settings, method)
        if gpu and cost.gpu_memory is None:
            raise UserError(
                f"the estimate for a GPU is of ViTs, not of {settings.distill.student}; leave out --gpu to measure here"
            )
        return method, cost
    if gpu:
        return None, plan_cost.describe_cost(settings)
    from adclr.training import job

    return job.build(settings), plan_cost.describe_cost(settings)


def _open_images(settings: Settings, images: int | None, gpu: Gpu | None, out: Path | None) -> Source | None:
    """Return the images, None where only their number is known."""
    path = settings.data.path
    if bool(path) == (images is not None):
        raise UserError(
            f"give the images, or their number as --images N; {'not both' if path else 'neither was given'}"
        )
    if gpu and settings.train.precision == "float32":
        raise UserError(
            "estimates for a GPU are in bfloat16; leave out train.precision=float32, or leave out --gpu to measure"
        )
    index, allowed = out / launch.INDEX if out is not None else None, settings.data.allow_damaged_shards
    store_cache.configure(settings.data.local_cache, settings.data.local_cache_gib)
    return open_source(path, index, allowed) if path else None


def estimate_step_seconds(
    settings: Settings,
    gpu: Gpu,
    local_batch: int,
    micro_batch: int,
    num_gpus: int = 1,
    total_steps: int | None = None,
    cost: Cost | None = None,  # None: that of a pretraining
) -> float:
    """Return the estimated time of a step on a GPU that is not present."""
    cost = cost or plan_cost.describe_cost(settings)
    image_seconds = sum(flops / (gpu.tflops * 1e12) * (BEST + PER_WIDTH / width) for flops, width in cost.work)
    if not plan_cost.compiles_blocks(settings, micro_batch, total_steps):
        image_seconds *= UNCOMPILED
    seconds, accumulate = UPDATE_SECONDS + local_batch * image_seconds, local_batch // micro_batch
    if plan_cost.allows_cuda_graph(settings) and accumulate == 1 and num_gpus == 1:
        return seconds
    return max(seconds, accumulate * cost.depth * LAUNCH_SECONDS)  # whichever of GPU and CPU waits for the other


def estimate_device(
    settings: Settings, cost: Cost, local_batch: int, num_gpus: int, gpu: Gpu, cached: float, total_steps: int
) -> Device:
    """Return the estimate for a GPU that is not present, of which images take `cached` bytes."""
    from adclr.training.micro_batch import GPU_SHARE, largest_divisor

    assert cost.gpu_memory is not None
    fixed, image_bytes = cost.gpu_memory
    free = GPU_SHARE * (gpu.gib * GIB - cached) - fixed
    micro = settings.train.micro_batch_size or largest_divisor(local_batch, image_bytes, free)
    rate = local_batch / estimate_step_seconds(settings, gpu, local_batch, micro, num_gpus, total_steps, cost)
    share = rate * cost.flops / (gpu.tflops * 1e12)
    basis = (
        f"ESTIMATED, not measured: {gpu.name} with {gpu.gib:.0f} GiB and {gpu.tflops:.0f} TFLOP/s in bfloat16, "
        f"of which {share:.0%} are assumed to be reached; on that GPU, leave out --gpu to measure"
    )
    return Device(basis, False, True, gpu.gib, free, fixed, image_bytes, micro, rate)


def _measure_device(
    settings: Settings,
    cost: Cost,
    method: Method | None,
    local_batch: int,
    num_gpus: int,
    cached: float,
    total_steps: int,
) -> Device:
    """Measure the present device by a few steps as training takes them: as many micro-batches, recorded or not."""
    import torch

    from adclr.system import devices
    from adclr.training import plan_trial
    from adclr.training.micro_batch import CPU_SHARE, GPU_SHARE, estimate_image_bytes, largest_divisor, measure_memory

    device = devices.select_device(settings.train.device)
    dtype = devices.autocast_dtype(settings.train.precision, device)
    assert method is not None
    method = method.to(device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        fixed, image_bytes = measure_memory(method, settings, device, dtype)
        total = machine.available_gpu_memory(device)
        free = GPU_SHARE * (total - cached) - fixed
    else:
        fixed, image_bytes = cost.host_bytes, estimate_image_bytes(settings)
        total = machine.host_memory()
        free = CPU_SHARE * total
    micro = settings.train.micro_batch_size or largest_divisor(local_batch, image_bytes, free)
    timed = None
    with suppress(torch.OutOfMemoryError):
        timed = plan_trial.time_steps(method, settings, device, dtype, local_batch, micro, num_gpus, total_steps)
    if timed is None:  # outside of the handler no traceback holds on to memory
        raise UserError(
            f"{micro} images at once do not fit into {total / GIB:.1f} GiB; "
            f"set train.micro_batch_size={largest_divisor(local_batch, image_bytes, free, max(1, micro // 2))}"
        )
    name = torch.cuda.get_device_name(device) if on_gpu else f"the {machine.cpu_count()} CPU cores of this machine"
    images = f"{timed.accumulate} × {timed.micro_batch}" if timed.accumulate > 1 else f"{timed.micro_batch}"
    basis = f"measured on {name}, {total / GIB:.1f} GiB free, with steps of {images} random images"
    if not on_gpu:
        if timed.slowdown > 1.2:
            basis += f"; times are for idle cores, and other programs make it {timed.slowdown:.1f} times slower now"
        basis += "; no GPU is used here: --gpu h200 estimates one"
    return Device(basis, True, on_gpu, total / GIB, free, fixed, image_bytes, micro, timed.images_per_second)


def _report(
    settings: Settings,
    cost: Cost,
    source: Source | None,
    count: int,
    num_gpus: int,
    device: Device,
    sample: Sample | None,
    views: float | None,  # images/s, where they are rendered by the cores that also take the steps
    out: Path | None,
) -> dict[str, Any]:
    """Return the plan as it is written to JSON."""
    batch, epochs = settings.train.batch_size, settings.train.epochs
    steps, fits = epochs * (count // batch), int(device.free_bytes / device.image_bytes)
    rate, warnings = num_gpus * device.images_per_second, []
    if device.micro_batch > fits:
        warnings.append(f"train.micro_batch_size={device.micro_batch} does not fit: at most {max(0, fits)} images do")
    decoded = sample.images_per_second if sample and not sample.cache else None  # in every epoch
    if views is not None:
        rate = 1 / (1 / rate + 1 / views + (1 / decoded if decoded else 0))
    elif device.measured and decoded:  # the decoding speed of another machine is not known
        if decoded < rate:
            warnings.append(
                f"decoding ({decoded:.0f} images/s) is slower than training ({rate:.0f} images/s) and sets the time; "
                "use smaller files or data.max_side"
            )
        rate = min(rate, decoded)
    hours = steps * batch / rate / 3600
    if 3600 * hours > plan_cost.LONG_SECONDS:
        warnings.append(plan_cost.describe_long_run(3600 * hours, device.on_gpu, settings.command))
    disk = _disk(settings, cost, source, count, steps)
    disk["free_gb"] = None if out is None else _free_bytes(out) / GB
    if out is not None and disk["free_gb"] < disk["total_gb"]:
        warnings.append(f"{out} has {format_size(disk['free_gb'])} free, less than the run needs; choose another --out")
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
        "parameters": dict(cost.parameters),
        "memory": {
            "gib": device.gib,
            "fixed_gib": device.fixed_bytes / GIB,
            "image_gib": device.image_bytes / GIB,
            "images_that_fit": fits,
            "micro_batch_size": device.micro_batch,
            "accumulate": batch // num_gpus // device.micro_batch,
            "needed_gib": (device.fixed_bytes + device.micro_batch * device.image_bytes) / GIB,
        },
        "time": {
            "gflop_per_image": cost.flops / 1e9,
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
            "kept": sample.cache,
            "images_per_second": sample.images_per_second,
            "threads": sample.threads,
        },
        "warnings": warnings,
    }


def _disk(settings: Settings, cost: Cost, source: Source | None, count: int, steps: int) -> dict[str, Any]:
    """Return the GB of the files of a run; while a checkpoint is written there is one more than are kept."""
    stamps = 24 * (count if count <= MOST_WATCHED else WATCHED)  # a key, a size and a time of each image
    index = NAME_BYTES * count
    if source is not None:
        index, listing = 0, source.listing  # a list or a data set needs no index
        if listing is not None:
            index = listing.nbytes
    checkpoint, backbone = cost.checkpoint_bytes, cost.backbone_bytes
    logs, checkpoints = plan_cost.log_bytes(settings, steps), settings.train.keep_checkpoints + 1
    return {
        "checkpoint_gb": checkpoint / GB,
        "checkpoints": checkpoints,
        "backbone_gb": backbone / GB,
        "logs_gb": logs / GB,
        "index_gb": (index + stamps) / GB,
        "total_gb": (checkpoints * checkpoint + backbone + logs + index + stamps) / GB,
    }


def _free_bytes(path: Path) -> float:
    """Return the free bytes of the disk on which a path would be created."""
    while not path.exists():
        path = path.parent
    return float(shutil.disk_usage(path).free)
