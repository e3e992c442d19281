"""A plan of a run as text for people: from the numbers that `planning.run` gives."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from adclr.system.progress import duration
from adclr.system.text import format_size

COLUMNS = 110
GB_IN_GIB = 2**30 / 1e9
LONG_SECONDS = 24 * 3600.0  # of a run; beyond, the user is warned


def describe(plan: Mapping[str, Any]) -> list[str]:
    """The plan as lines of text."""
    memory, spent, disk, decoded = plan["memory"], plan["time"], plan["disk"], plan["decoded"]
    parameters, many = plan["parameters"], f" on each of {plan['gpus']} GPUs" if plan["gpus"] > 1 else ""
    rate, free = spent["images_per_second"], disk["free_gb"]
    sizes = {name: format_size(disk[f"{name}_gb"]) for name in ("total", "checkpoint", "backbone", "logs", "index")}
    rows = {
        "recipe": f"{plan['recipe']}: {plan['images']} images, {plan['epochs']} epochs, {plan['steps']} steps; "
        f"backbone of {parameters['backbone'] / 1e6:.1f} M parameters, head of {parameters['head'] / 1e6:.1f} M",
        "basis": plan["basis"],
        "memory": f"{memory['fixed_gib']:.2f} GiB and {memory['image_gib']:.3f} GiB for each image: "
        f"{memory['images_that_fit']} images fit at once{many}",
        "batch": f"train.batch_size={plan['batch_size']} as {memory['accumulate']} × {memory['micro_batch_size']} "
        f"images{many}, {memory['needed_gib']:.1f} of {memory['gib']:.1f} GiB",
        "time": f"{duration(3600 * spent['hours'])}: {rate:.{0 if rate >= 100 else 2}f} images/s, "
        f"{duration(spent['seconds_per_epoch'])} an epoch, {spent['gflop_per_image']:.3g} GFLOP an image; "
        + _covered(spent),
        "disk": f"{sizes['total']}: {disk['checkpoints']} checkpoints of {sizes['checkpoint']} (one of them while it "
        f"is written), backbone {sizes['backbone']}, logs {sizes['logs']}, index {sizes['index']}"
        + ("" if free is None else f"; {format_size(free)} are free"),
    }
    if decoded:
        kept = {"gpu": "kept on the GPU", "ram": "kept in memory"}.get(decoded["kept"], "decoded anew in every epoch")
        rows["images"] = (
            f"{format_size(decoded['gib'] * GB_IN_GIB)} when decoded: {kept}; about {decoded['images_per_second']:.0f} "
            f"images/s are decoded by {decoded['threads']} threads here"
        )
    told = [*rows.items(), *(("warning", warning) for warning in plan["warnings"])]
    return [textwrap.fill(f"{name:<9}{text}", COLUMNS, subsequent_indent=" " * 9) for name, text in told]


def _covered(spent: Mapping[str, Any]) -> str:
    """What the time is of."""
    steps, views = spent["steps_images_per_second"], spent["views_images_per_second"]
    if views is None:
        return "the step alone, without probes"
    return f"steps at {steps:.3g} images/s and their views at {views:.3g}, without probes"


def long_run(seconds: float, on_gpu: bool) -> str:
    """A sentence for who starts a run that takes so long."""
    shorter = "fewer train.epochs, a smaller model.size, smaller views.global_size or fewer views.num_local"
    shorter += ", or more GPUs, make it shorter" if on_gpu else ", or a GPU, make it shorter"
    if not on_gpu:
        shorter += "; --recipe adclr_cpu is made for a CPU"
    return f"it takes about {duration(seconds)}; {shorter}"
