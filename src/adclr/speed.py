"""What makes a step fast beyond its own code: compiled blocks; and what it can be asked to give up speed for."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from adclr import fit
from adclr.blocks import RunBlock
from adclr.config import UserError
from adclr.method import ADCLR
from adclr.settings import Settings


class Compiled(NamedTuple):
    seconds: float  # that compiling took, or finding what an earlier run had compiled
    failure: str | None  # why blocks run uncompiled although they should not


def prepare(
    method: ADCLR, settings: Settings, device: torch.device, dtype: torch.dtype | None, count: int
) -> Compiled | None:
    """Compiles the blocks for micro-batches of `count` images, where settings ask for it; None where they do not.

    A step of noise is done so that whatever goes wrong does so here, forward and backward: then blocks stay as they are
    and the user is told. Leaves the method as it was.
    """
    backbones = (method.student.backbone, method.teacher.backbone)
    if settings.train.checkpoint_activations:
        method.student.backbone.checkpoint_blocks()
    if (
        settings.train.shard
        or settings.train.compile == "off"
        or (settings.train.compile == "auto" and device.type != "cuda")
    ):
        return None
    plain: list[RunBlock] = [backbone.run_block for backbone in backbones]
    started, failure = time.monotonic(), None
    torch.compiler.reset()  # all models share one function, and 8 forms of it are kept
    for backbone in backbones:
        backbone.compile_blocks()
    try:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            losses = method(fit.random_views(settings, count, device), settings.method.teacher_temperature)
        losses.total.backward()
        del losses
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler has many ways to fail, most of them somebody's missing compiler
        for backbone, before in zip(backbones, plain, strict=True):
            backbone.run_block = before
        reason = " ".join(str(error).split("\n\n")[0].split())  # what follows is a traceback and advice on it
        failure = f"{type(error).__name__}: {reason[:300]}"
        print(f"the blocks could not be compiled, so training is slower ({failure})", file=sys.stderr)
    method.forget()
    return Compiled(time.monotonic() - started, failure)


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
