"""What makes a step fast beyond its own code: compiled blocks; and what it can be asked to give up speed for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from adclr.config.sections import UserError
from adclr.config.settings import Settings
from adclr.model.compiled import Compiled, compile_blocks
from adclr.model.method import ADCLR
from adclr.training import micro_batch


def prepare(
    method: ADCLR, settings: Settings, device: torch.device, dtype: torch.dtype | None, count: int
) -> Compiled | None:
    """Compiles the blocks for micro-batches of `count` images, where settings ask for it; None where they do not.

    Leaves the method as it was.
    """
    if settings.train.checkpoint_activations:
        method.student.backbone.checkpoint_blocks()
    if (
        settings.train.shard
        or settings.train.compile == "off"
        or (settings.train.compile == "auto" and device.type != "cuda")
    ):
        return None

    def trial() -> None:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            losses = method(micro_batch.random_views(settings, count, device), settings.method.teacher_temperature)
        losses.total.backward()

    compiled = compile_blocks((method.student.backbone, method.teacher.backbone), trial)
    method.forget()
    return compiled


def ready(compiled: Compiled | None) -> bool:
    """Whether the step is to be recorded too: what cannot be compiled is not trusted with it."""
    return compiled is not None and compiled.failure is None


def _check_cublas() -> None:
    """cuBLAS must have been told before its first product in this process."""
    if torch.cuda.is_available():
        try:
            torch.ones(2, 2, device="cuda").mm(torch.ones(2, 2, device="cuda"))
        except RuntimeError:
            raise UserError(
                "train.deterministic=true comes too late in this process, which has used the GPU; "
                "set the environment variable CUBLAS_WORKSPACE_CONFIG=:4096:8 before it starts"
            ) from None


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Operations that a GPU does not repeat to the bit are errors, or replaced by such that it does."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, finds nothing
    try:
        _check_cublas()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]  # type: ignore[attr-defined]
