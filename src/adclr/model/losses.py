"""Centers, targets and the losses, in plain PyTorch.

H(p_t, p_s) = -sum_k p_t[k] log p_s[k], at least in float32: a temperature of 0.04 magnifies the rounding of bfloat16
logits too much.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adclr.system import distributed


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def soft_cross_entropy(target: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """Return H(target, softmax(logits / temperature)) of each row: ...×K, ...×K -> ..."""
    return -(target * F.log_softmax(_at_least_float32(logits) / temperature, dim=-1)).sum(dim=-1)


def paired_loss(targets: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """Return the mean of H over rows and over all (teacher view, student view) pairs of different views.

    targets: V_t×rows×K probabilities; logits: V_s×rows×K with V_s >= V_t, the teacher's views first. Rows are the
    images in the global loss and the queries of all images in the query loss.
    """
    num_teacher, num_student = targets.shape[0], logits.shape[0]
    pairs = num_teacher * (num_student - 1)
    sum_of_targets = targets.sum(dim=0)
    total = logits.new_zeros((), dtype=torch.float32)
    for view in range(num_student):
        # H is linear in the target: the targets of a student view are summed first
        target = sum_of_targets - targets[view] if view < num_teacher else sum_of_targets
        total = total + soft_cross_entropy(target, logits[view], temperature).mean()
    return total / pairs


def masked_loss(targets: Tensor, logits: Tensor, weights: Tensor, temperature: float) -> Tensor:
    """Return the sum of H over masked patches, each times its weight, 1 / (masked patches of its view · B · V).

    targets, logits: M×K; weights: M. Without masked patches it is 0, still part of the graph. The neighbor loss is the
    same sum over all patches, see `neighbor_weights`.
    """
    return (soft_cross_entropy(targets, logits, temperature) * weights).sum()


def neighbor_weights(batch: int, patches: Sequence[int], num_views: Sequence[int], like: Tensor) -> Tensor:
    """Return the weight of every patch in the neighbor loss, 1 / (its view's patches · B · V).

    `patches` and `num_views` are those of the views of each size; so every view counts the same.
    """
    views = sum(num_views)
    sizes = zip(patches, num_views, strict=True)
    return torch.cat([like.new_full((n * count * batch,), 1 / (n * batch * views)) for n, count in sizes])


def anchor_loss(patches: Tensor, anchor: Tensor) -> Tensor:
    """Return the mean squared difference of the similarities between the patches of each image, both B×N×D.

    It is DINOv3's Gram anchoring: features may change, but not which patches of an image are similar.
    """
    with torch.autocast(patches.device.type, enabled=False):
        student, fixed = (F.normalize(part.float(), dim=-1) for part in (patches, anchor))
        return F.mse_loss(student @ student.mT, fixed @ fixed.mT)


def sinkhorn(logits: Tensor, temperature: float | Tensor, iterations: int = 3) -> Tensor:
    """Return Sinkhorn-Knopp targets: rows sum to 1, and the batch of all processes uses all prototypes equally."""
    scaled = logits.float() / temperature
    rows = distributed.all_reduce_sum(torch.full((), float(logits.shape[0]), device=logits.device)).clamp(min=1)
    largest = scaled.max() if scaled.numel() else scaled.new_full((), -torch.inf)
    largest = -distributed.all_reduce_min(-largest)  # the same in all processes, so that no exponential overflows
    q = torch.exp(scaled - largest)
    num_prototypes = q.shape[1]
    for _ in range(iterations):
        q = q / distributed.all_reduce_sum(q.sum(dim=0, keepdim=True)).clamp(min=1e-30) / num_prototypes
        q = q / q.sum(dim=1, keepdim=True).clamp(min=1e-30) / rows
    return q * rows


class Center(nn.Module):
    """The running mean of the teacher's logits of one kind of token.

    It stays the same during the micro-batches of a step and moves once at its end, by the mean over all of them and all
    processes: one all-reduce of K + 1 numbers.
    """

    value: Tensor
    _sum: Tensor

    def __init__(self, num_prototypes: int, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("value", torch.zeros(num_prototypes))
        # of this step: the sum of logits, K, and their number
        self.register_buffer("_sum", torch.zeros(num_prototypes + 1), persistent=False)

    def targets(self, logits: Tensor, temperature: float | Tensor) -> Tensor:
        """Return centered and sharpened probabilities, n×K."""
        return F.softmax((_at_least_float32(logits) - self.value) / temperature, dim=-1)

    @torch.no_grad()
    def observe(self, mean: Tensor, count: int) -> None:
        """Add `count` rows of logits, given their mean."""
        self._sum[:-1] += mean * count
        self._sum[-1] += count

    @torch.no_grad()
    def update(self, ok: Tensor) -> None:
        """Move the center unless `ok` (a 0-dim bool tensor) is false, and reset the sums."""
        total = distributed.all_reduce_sum(self._sum)
        mean = total[:-1] / total[-1].clamp(min=1)
        moved = self.value * self.momentum + mean * (1 - self.momentum)
        self.value.copy_(torch.where(ok & (total[-1] > 0), moved, self.value))
        self.forget()

    def forget(self) -> None:
        """Reset the sums of this step."""
        self._sum.zero_()
