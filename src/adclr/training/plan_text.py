"""A plan as lines of text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from adclr.system.machine import GIB
from adclr.system.progress import format_duration
from adclr.system.text import format_size

COLUMNS = 110  # of the printed plan
GB = 1e9


def describe(plan: Mapping[str, Any]) -> list[str]:
    """Return a plan as lines of text."""
    memory, time, disk, decoded = plan["memory"], plan["time"], plan["disk"], plan["decoded"]
    parameters, on_each = plan["parameters"], f" on each of {plan['gpus']} GPUs" if plan["gpus"] > 1 else ""
    rate, free = time["images_per_second"], disk["free_gb"]
    sizes = {name: format_size(disk[f"{name}_gb"]) for name in ("total", "checkpoint", "backbone", "logs", "index")}
    rows = {
        "recipe": f"{plan['recipe']}: {plan['images']} images, {plan['epochs']} epochs, {plan['steps']} steps; "
        + _describe_parameters(parameters),
        "basis": plan["basis"],
        "memory": f"{memory['fixed_gib']:.2f} GiB plus {memory['image_gib']:.3f} GiB per image: "
        f"up to {memory['images_that_fit']} images per step fit{on_each}",
        "batch": f"train.batch_size={plan['batch_size']} as {memory['accumulate']} × {memory['micro_batch_size']} "
        f"images{on_each}, {memory['needed_gib']:.1f} of {memory['gib']:.1f} GiB",
        "time": f"{format_duration(3600 * time['hours'])}: {rate:.{0 if rate >= 100 else 2}f} images/s, "
        f"{format_duration(time['seconds_per_epoch'])} per epoch, {time['gflop_per_image']:.3g} GFLOP per image; "
        + _describe_rates(time),
        "disk": f"{sizes['total']}: {disk['checkpoints']} checkpoints of {sizes['checkpoint']} (one of them while it "
        f"is written), backbone {sizes['backbone']}, logs {sizes['logs']}, index {sizes['index']}"
        + ("" if free is None else f"; {format_size(free)} are free"),
    }
    if decoded:
        storage = {"gpu": "cached on the GPU", "ram": "cached in memory"}.get(
            decoded["kept"], "decoded again in every epoch"
        )
        rows["images"] = (
            f"{format_size(decoded['gib'] * (GIB / GB))} when decoded: {storage}; about "
            f"{decoded['images_per_second']:.0f} images/s are decoded by {decoded['threads']} threads"
        )
    lines = [*rows.items(), *(("warning", warning) for warning in plan["warnings"])]
    return [textwrap.fill(f"{name:<9}{text}", COLUMNS, subsequent_indent=" " * 9) for name, text in lines]


def _describe_parameters(parameters: Mapping[str, int]) -> str:
    millions = {name: f"{count / 1e6:.1f} M" for name, count in parameters.items()}
    if "teacher" in millions:
        return (
            f"student of {millions['backbone']} parameters, projector of {millions['head']}, teacher of "
            f"{millions['teacher']}"
        )
    return f"backbone of {millions['backbone']} parameters, head of {millions['head']}"


def _describe_rates(time: Mapping[str, Any]) -> str:
    """Return what the time includes."""
    steps, views = time["steps_images_per_second"], time["views_images_per_second"]
    if views is None:
        return "the step alone, without probes"
    return f"steps at {steps:.4g} images/s and their views at {views:.0f}, without probes"
