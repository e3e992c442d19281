"""The optimizer with its parameter groups, and schedules as functions of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adclr.config.settings import Settings
from adclr.model.optim import cosine, layer_of, warmup_cosine


@dataclass(frozen=True)
class Values:
    """The scheduled values of one step."""

    lr: float
    weight_decay: float
    momentum: float  # the teacher's
    teacher_temperature: float
    freeze_last_layer: bool
    freeze_backbone: bool = False  # and the teacher's with it
    query_temperature: float | None = None  # the teacher's for queries; None: the same


@dataclass(frozen=True)
class Schedules:
    """All scheduled values by step; an epoch is as many full batches as the images give."""

    settings: Settings
    steps_per_epoch: int

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.settings.train.epochs * self.steps_per_epoch

    def at(self, step: int) -> Values:
        """Return the values of a step, which is counted from 0."""
        optim, method, total = self.settings.optim, self.settings.method, self.total_steps
        epoch = step // self.steps_per_epoch
        peak = optim.lr * self.settings.train.batch_size / 256
        warmup = round(optim.warmup_epochs * self.steps_per_epoch)
        lr = warmup_cosine(step, warmup, total, peak, optim.final_lr)
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
    """Return AdamW; parameters of one dimension (biases, norms, LayerScale) are not decayed.

    The fused kernel is used on every device because it alone takes the flag that voids a step on the device. Decay is
    done by `optimizer_step`, which can take its value from the device.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "decayed": True},
        {"params": [p for p in parameters if p.ndim <= 1], "decayed": False},
    ]
    if settings.optim.layer_decay != 1:
        groups = _layer_groups(model, settings)
    on_gpu = any(p.is_cuda for p in parameters)
    betas = settings.optim.betas
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, weight_decay=0.0, fused=True, capturable=on_gpu)


def _layer_groups(model: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """Return a group for each layer and decay; the learning rate of a layer is `layer_decay` times that of the next.

    The head and the last norm have the whole learning rate, and so have class attention and the mask token, which no
    weights bring along.
    """
    depth, groups = settings.model.shape[1], dict[tuple[int, bool], dict[str, Any]]()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        part, _, inner = name.partition(".")
        layer, decayed = depth + 1, parameter.ndim > 1
        if part == "backbone":
            layer = layer_of(inner, depth, settings.model.class_attention > 0)
        scale = settings.optim.layer_decay ** (depth + 1 - layer)
        group = groups.setdefault((layer, decayed), {"params": [], "decayed": decayed, "scale": scale})
        group["params"].append(parameter)
    return list(groups.values())
