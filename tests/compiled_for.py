"""Compiles our kernels for a GPU that need not be there: `python tests/compiled_for.py 90` for an H200.

Triton asks the machine's driver what to compile for, and then launches. Here it is told, and nothing is launched; what
the kernels would have written stays as it was, and so do the numbers that follow from it. Prints JSON: of each compiled
form of a kernel its name, and bytes of shared memory, or what the compiler said.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from adclr.config.settings import Settings
from adclr.data.augment import frame_kernels, launch_kernels
from adclr.data.packed import pack
from adclr.data.random_draws import key_of
from adclr.data.view_plan import plan_batch
from adclr.model.ops import attention, head_loss, mlp, norm, rotation
from adclr.model.positions import rotation_of_groups
from adclr.system import trial_kernels

# KiB that a program may have on chip, of 1 more: A100, ..., RTX 50
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
LENGTHS = [(207, 197), (37, 37), (393, 197), (64, 17), (272, 272)]


class Absent:
    """What Triton asks of a driver in order to compile."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        return 0


found: dict[str, dict[str, Any]] = {}
launch = JITFunction.run


def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> None:  # noqa: ARG001
    name = f"{kernel.__module__.removeprefix('adclr.')}.{kernel.__name__}"
    try:
        made = launch(kernel, *args, warmup=True, **options)
    except Exception as error:
        text = " ".join(str(error).split())[-300:]
        found[f"{name} {text}"] = {"name": name, "error": text}
    else:
        found[made.hash] = {"name": name, "shared": made.metadata.shared}


def attend(dim: int, heads: int, groups: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
    qkv = torch.zeros(sum(group[0] * group[1] for group in groups), 3 * dim, dtype=dtype, requires_grad=True)
    attention.fused(qkv, [attention.Group(*group) for group in groups], heads).sum().backward()
    with torch.no_grad():
        attention.fused(qkv, [attention.Group(*group) for group in groups], heads)


def turn(
    dim: int, heads: int, groups: Sequence[tuple[int, ...]], grids: Sequence[tuple[int, int]], dtype: torch.dtype
) -> None:
    qkv = torch.zeros(sum(group[0] * group[1] for group in groups), 3 * dim, dtype=dtype, requires_grad=True)
    shapes = [attention.Group(*group) for group in groups]
    table = rotation_of_groups(grids, 1, shapes, dim // heads, qkv)
    rotation.fused(qkv, table, shapes, heads).sum().backward()


def blocks(dim: int, dtype: torch.dtype) -> None:
    x, branch = (torch.zeros(64, dim, dtype=dtype, requires_grad=True) for _ in range(2))
    weight, bias = torch.ones(dim, requires_grad=True), torch.zeros(dim, requires_grad=True)
    for added, factor in ((branch, torch.ones(64)), (branch, None), (None, None)):
        for tokens in (x, x.float().detach().requires_grad_()):  # float32: train.residual_precision
            total, y = norm.fused(tokens, added, factor, weight, bias, 1e-6, dtype)
            (total.sum() + y.sum()).backward()
    shapes = ((4 * dim, dim), (4 * dim,), (dim, 4 * dim), (dim,))
    mlp.fused(x, *(torch.zeros(*shape, requires_grad=True) for shape in shapes)).sum().backward()


def losses(prototypes: int, low: bool) -> None:
    center = torch.zeros(prototypes)
    parts = [head_loss.Part(2, 8, center, 1.0), head_loss.Part(2, 2, center, 0.5)]
    parts.append(head_loss.Part(4, 1, center, 1.0, torch.ones(4)))
    student = torch.zeros(sum(part.student_rows for part in parts), 256, requires_grad=True)
    teacher = torch.zeros(sum(part.teacher_rows for part in parts), 256)
    matrix = torch.zeros(prototypes, 256, requires_grad=True)
    with torch.autocast("cpu", enabled=low):
        head_loss.head_loss(student, matrix, teacher, matrix.detach(), parts, 0.1, 0.07).total.backward()


def views(global_size: int, local_size: int, patch: int) -> None:
    packed = pack([np.zeros((3, 300, 400), np.uint8)])
    settings = Settings.model_validate(
        {"views": {"global_size": global_size, "local_size": local_size, "jitter": 1.0}, "model": {"patch_size": patch}}
    )
    planned = plan_batch(settings, 0, np.array([key_of("1")], np.uint64), packed.sizes)
    kinds = [planned.global_crops, planned.local_crops, planned.queries]
    launch_kernels.render_crops(packed, [crops for crops in kinds if crops], settings.data.mean, settings.data.std)
    frames = np.array([[256, 341, 16, 58, 224, 224]])
    frame_kernels.resize(packed, frames, np.zeros(1, np.int64), torch.zeros(3 * 224 * 224, dtype=torch.uint8))


def main(capability: int, all_shapes: bool) -> None:
    driver.set_active(Absent(capability))  # type: ignore[arg-type]
    half, enough_memory = (
        torch.bfloat16,
        (SHARED[capability] + 1) * 1024 >= attention.MIN_SHARED_MEMORY,
    )  # as `attention.fits` asks
    with mock.patch.object(JITFunction, "run", compile_only):
        with suppress(RuntimeError):  # it finds that nothing ran
            trial_kernels.launch(torch.device("cpu"))
        views(224, 96, 16)
        blocks(384, half)
        turn(384, 6, [(2, 207, 197), (2, 37, 37)], [(14, 14), (6, 6)], half)
        losses(65536, low=True)
        if enough_memory:
            attend(384, 6, [(2, 207, 197), (2, 37, 37)], half)  # ViT-S/16
            attend(384, 6, [(2, 207, 197, 1)], half)  # queries that read patches only
            attend(256, 2, [(2, 207, 197)], half)  # heads of 128
        if all_shapes:
            views(96, 48, 8)
            for dim in (192, 384, 768, 1024):
                blocks(dim, half)
                blocks(dim, torch.float16)
            for prototypes in (1000, 65536):
                losses(prototypes, low=False)
                losses(prototypes, low=True)
            if enough_memory:
                for dtype in attention.DTYPES:
                    for dim, heads in ((384, 6), (96, 3), (64, 4), (512, 4)):
                        attend(dim, heads, [(2, tokens, image) for tokens, image in LENGTHS], dtype)
    print(json.dumps(list(found.values())))


if __name__ == "__main__":
    main(int(sys.argv[1]), "--all" in sys.argv)
