"""Schedules, parameter groups and the optimizer step that pretraining and fine-tuning share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from adclr.system import distributed


def cosine(start: float, end: float, progress: float) -> float:
    """Return the cosine schedule from `start` at progress 0 to `end` at progress 1 and beyond."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def warmup_cosine(step: int, warmup: int, total: int, peak: float, final: float) -> float:
    """Return the value at `step`: linear from 0 to `peak` over `warmup` steps, then a cosine to `final` at `total`."""
    if step < warmup:
        return peak * step / warmup
    return cosine(peak, final, (step - warmup) / max(1, total - warmup))


UNDECAYED = ("cls_token", "reg_token", "pos_embed")


def layer_of(name: str, depth: int, class_attention: bool = False) -> int:
    """Return the layer of a parameter of a ViT: 0 is the embedding, block i is i + 1, all else is depth + 1.

    With class attention `[CLS]` is of the last layer too, as the blocks that make it.
    """
    first, _, rest = name.partition(".")
    if class_attention and first == "cls_token":
        return depth + 1
    if first in (*UNDECAYED, "patch_embed"):
        return 0
    return int(rest.partition(".")[0]) + 1 if first == "blocks" else depth + 1


def layer_decay_groups(
    named: Iterable[tuple[str, nn.Parameter]], depth: int, layer_decay: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Return parameter groups with layer-wise learning rates; `scale` is the factor of the learning rate of each.

    Layer 0 is the embedding, block i is layer i + 1, the final norm and the head are layer depth + 1; the learning rate
    of a layer is `layer_decay` times that of the next. Tokens, position embeddings, norms and biases have no weight
    decay. Class-attention blocks, and with them `[CLS]`, are of the last layer too.
    """
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    parameters = list(named)
    class_attention = any(name.startswith("blocks_token_only.") for name, _ in parameters)
    for name, parameter in parameters:
        layer = layer_of(name, depth, class_attention)
        decayed = parameter.ndim > 1 and name.partition(".")[0] not in UNDECAYED
        group = {
            "params": [],
            "scale": layer_decay ** (depth + 1 - layer),
            "weight_decay": weight_decay if decayed else 0.0,
        }
        groups.setdefault((layer, decayed), group)["params"].append(parameter)
    return list(groups.values())


@torch.no_grad()
def optimizer_step(
    optimizer: torch.optim.AdamW,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    clip_norm: float | None,
    loss: Tensor,
    in_pieces: bool = False,
) -> Tensor:
    """Clip, decay and step; return whether the step was finite, as a 0-dim bool on the device.

    A group may have a `scale` of its learning rate. Each parameter tensor is clipped by its own norm. A loss or
    gradient that is not finite voids the step in every process: parameters, moments and step counts stay the same to
    the bit, without a synchronization with the host. `in_pieces` is for sharded parameters.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norms = torch.stack(torch._foreach_norm(gradients))
    if in_pieces:
        norms = distributed.all_reduce_sum(norms.square()).sqrt()
    ok = distributed.all_reduce_min((norms.isfinite().all() & loss.isfinite()).float())
    if clip_norm is not None:
        factors = (clip_norm / (norms + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, list(factors.unbind()))
    for group in optimizer.param_groups:
        group_lr = group["lr"] = lr * group["scale"] if "scale" in group else lr
        decayed: list[Tensor] = [p for p in group["params"] if p.grad is not None and group["decayed"]]
        if decayed:
            torch._foreach_mul_(decayed, torch.where(ok > 0, 1 - group_lr * weight_decay, 1.0).to(torch.float32))
    optimizer.found_inf = 1 - ok  # type: ignore[attr-defined]  # the fused kernel then writes nothing
    optimizer.step()
    return ok.bool()
