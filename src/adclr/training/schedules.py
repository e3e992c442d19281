"""Parameter groups, clipping, and schedules as functions of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adclr.config.settings import Settings
from adclr.system import distributed


@dataclass(frozen=True)
class Values:
    """What a step is done with."""

    lr: float
    weight_decay: float
    momentum: float  # the teacher's
    teacher_temperature: float
    freeze_last_layer: bool
    freeze_backbone: bool = False  # and the teacher's with it
    query_temperature: float | None = None  # the teacher's for queries; None: the same

    @property
    def numbers(self) -> tuple[float, ...]:
        """Those that a device can be told."""
        for_queries = self.teacher_temperature if self.query_temperature is None else self.query_temperature
        return self.lr, self.weight_decay, self.momentum, self.teacher_temperature, for_queries

    @property
    def frozen(self) -> tuple[bool, bool]:
        """What stands still, which decides what is computed: the head's last layer, the backbone."""
        return self.freeze_last_layer, self.freeze_backbone


def cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def warm_cosine(step: int, warmup: int, total: int, peak: float, final: float) -> float:
    """Linear from 0 to `peak` over `warmup` steps, then a cosine down to `final` at `total`."""
    if step < warmup:
        return peak * step / warmup
    return cosine(peak, final, (step - warmup) / max(1, total - warmup))


@dataclass(frozen=True)
class Schedules:
    """Everything by step; an epoch is as many whole batches as the images give."""

    settings: Settings
    steps_per_epoch: int

    @property
    def total_steps(self) -> int:
        return self.settings.train.epochs * self.steps_per_epoch

    def at(self, step: int) -> Values:
        optim, method, total = self.settings.optim, self.settings.method, self.total_steps
        epoch = step // self.steps_per_epoch
        peak = optim.lr * self.settings.train.batch_size / 256
        warmup = round(optim.warmup_epochs * self.steps_per_epoch)
        lr = warm_cosine(step, warmup, total, peak, optim.final_lr)
        warm = method.teacher_temperature_warmup_epochs
        rise = min(1.0, epoch / warm) if warm else 1.0
        start, end = method.teacher_temperature_start, method.teacher_temperature
        query_temperature = method.query_temperature
        if query_temperature is not None and method.query_temperature_start is not None:
            query_start = method.query_temperature_start
            query_temperature = query_start + (query_temperature - query_start) * rise
        return Values(
            lr=lr,
            weight_decay=cosine(optim.weight_decay, optim.weight_decay_end, step / total),
            momentum=cosine(method.momentum, method.momentum_end, step / total),
            teacher_temperature=start + (end - start) * rise,
            query_temperature=query_temperature if self.settings.views.num_queries else None,
            freeze_last_layer=step < optim.freeze_last_layer_epochs * self.steps_per_epoch,
            freeze_backbone=step < self.settings.frozen_epochs * self.steps_per_epoch,
        )


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW; parameters of one dimension (biases, norms, LayerScale) are not decayed.

    The fused kernel is used on every device because it alone takes the flag that voids a step on the device. Decay is
    left to `update`, which can take it from the device.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "decayed": True},
        {"params": [p for p in trained if p.ndim <= 1], "decayed": False},
    ]
    on_gpu = any(p.is_cuda for p in trained)
    betas = settings.optim.betas
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, weight_decay=0.0, fused=True, capturable=on_gpu)


UNDECAYED = ("cls_token", "reg_token", "pos_embed")


def layer_groups(
    named: Iterable[tuple[str, nn.Parameter]], depth: int, layer_decay: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Parameter groups of a fine-tuning; `scale` is what the learning rate of each is multiplied with.

    Layer 0 is what makes tokens, block i is layer i + 1, the last norm and the head are layer depth + 1; each layer is
    `layer_decay` times as fast as the one above it. Tokens, positions and what has one dimension are not decayed.
    """
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in named:
        first, _, rest = name.partition(".")
        if first in (*UNDECAYED, "patch_embed"):
            layer = 0
        else:
            layer = int(rest.partition(".")[0]) + 1 if first == "blocks" else depth + 1
        decayed = parameter.ndim > 1 and first not in UNDECAYED
        new = {
            "params": [],
            "scale": layer_decay ** (depth + 1 - layer),
            "weight_decay": weight_decay if decayed else 0.0,
        }
        groups.setdefault((layer, decayed), new)["params"].append(parameter)
    return list(groups.values())


@torch.no_grad()
def update(
    optimizer: torch.optim.AdamW,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    clip_norm: float | None,
    loss: Tensor,
    in_pieces: bool = False,
) -> Tensor:
    """Clips, decays and steps; returns whether the step was good, as a 0-dim bool on the device.

    Each parameter tensor is clipped on its own. A loss or gradient that is not finite voids the step in every process:
    parameters, moments and step counts stay as they are, to the bit. The host is never asked. `in_pieces`: each process
    has a piece of every tensor only.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norms = torch.stack(torch._foreach_norm(gradients))
    if in_pieces:
        norms = distributed.sum_(norms.square()).sqrt()
    ok = distributed.min_((norms.isfinite().all() & loss.isfinite()).float())
    if clip_norm is not None:
        factors = (clip_norm / (norms + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, list(factors.unbind()))
    for group in optimizer.param_groups:
        group["lr"] = lr
        decayed: list[Tensor] = [p for p in group["params"] if p.grad is not None and group["decayed"]]
        if decayed:
            torch._foreach_mul_(decayed, torch.where(ok > 0, 1 - lr * weight_decay, 1.0).to(torch.float32))
    optimizer.found_inf = 1 - ok  # type: ignore[attr-defined]  # the fused kernel then writes nothing
    optimizer.step()
    return ok.bool()
