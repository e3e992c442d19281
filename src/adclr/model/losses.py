"""Centers, targets and the three losses; they know only tensors.

H(p_t, p_s) = -sum_k p_t[k] log p_s[k], always in float32: the logits of a bfloat16 network have too few bits for
the differences that a temperature of 0.04 makes of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adclr.system import distributed


def soft_cross_entropy(target: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """H(target, softmax(logits / temperature)) of each row: ...×K, ...×K -> ..."""
    return -(target * F.log_softmax(logits.float() / temperature, dim=-1)).sum(dim=-1)


def paired_loss(targets: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """The mean of H over rows and over all (teacher view, student view) pairs of different views.

    targets: V_t×rows×K probabilities; logits: V_s×rows×K with V_s >= V_t, the teacher's views first. With rows the
    images this is the global loss; with rows the queries of all images it is the query loss.
    """
    num_teacher, num_student = targets.shape[0], logits.shape[0]
    pairs = num_teacher * (num_student - 1)
    together = targets.sum(dim=0)
    total = logits.new_zeros((), dtype=torch.float32)
    for view in range(num_student):
        # all targets of one student view are added first, which is exact: H is linear in the target
        target = together - targets[view] if view < num_teacher else together
        total = total + soft_cross_entropy(target, logits[view], temperature).mean()
    return total / pairs


def masked_loss(targets: Tensor, logits: Tensor, weights: Tensor, temperature: float) -> Tensor:
    """Sum over masked patches of H times the patch's weight, 1 / (masked patches of its view · images · views).

    targets, logits: M×K; weights: M. Without any masked patch it is 0, still joined to the graph.
    """
    return (soft_cross_entropy(targets, logits, temperature) * weights).sum()


def sinkhorn(logits: Tensor, temperature: float | Tensor, iterations: int = 3) -> Tensor:
    """Targets with equal use of all prototypes over the batch of all processes (Sinkhorn-Knopp); rows sum to 1."""
    scaled = logits.float() / temperature
    rows = distributed.sum_(torch.full((), float(logits.shape[0]), device=logits.device)).clamp(min=1)
    top = scaled.max() if scaled.numel() else scaled.new_full((), -torch.inf)
    top = -distributed.min_(-top)  # one shift for all, so that no exponential overflows
    q = torch.exp(scaled - top)
    num_prototypes = q.shape[1]
    for _ in range(iterations):
        q = q / distributed.sum_(q.sum(dim=0, keepdim=True)).clamp(min=1e-30) / num_prototypes
        q = q / q.sum(dim=1, keepdim=True).clamp(min=1e-30) / rows
    return q * rows


class Center(nn.Module):
    """The running mean of the teacher's outputs of one kind of token.

    It is used while a step's micro-batches are seen and moves once at the step's end, from all of them and from all
    processes: one all-reduce of K + 1 numbers.
    """

    value: Tensor
    _sum: Tensor

    def __init__(self, num_prototypes: int, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("value", torch.zeros(num_prototypes))
        # what this step has seen: the sum of outputs, and their number in the last place
        self.register_buffer("_sum", torch.zeros(num_prototypes + 1), persistent=False)

    def targets(self, logits: Tensor, temperature: float | Tensor) -> Tensor:
        return F.softmax((logits.float() - self.value) / temperature, dim=-1)

    @torch.no_grad()
    def observe(self, mean: Tensor, count: int) -> None:
        """Adds `count` outputs, of which only the mean is needed."""
        self._sum[:-1] += mean * count
        self._sum[-1] += count

    @torch.no_grad()
    def update(self, ok: Tensor) -> None:
        """Moves the center unless `ok` (a 0-dim bool tensor) says that the step is void; forgets what it saw."""
        seen = distributed.sum_(self._sum)
        mean = seen[:-1] / seen[-1].clamp(min=1)
        moved = self.value * self.momentum + mean * (1 - self.momentum)
        self.value.copy_(torch.where(ok & (seen[-1] > 0), moved, self.value))
        self.forget()

    def forget(self) -> None:
        """What this step has seen, which other processes are not asked about."""
        self._sum.zero_()
