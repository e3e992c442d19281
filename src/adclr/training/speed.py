"""What makes a step fast beyond its own code: compiled blocks."""

from __future__ import annotations

import torch

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
