"""The prototypes and the losses in one operation, which never holds all logits, rows×K, at once.

K is large: logits in float32 for the rows of 256 images are gigabytes, and softmax, target and gradient are as large
again. Here the logits of a chunk of items are computed, read twice and replaced by their gradient; backward needs only
the gradients of the rows and of the prototypes. They are known in forward because the losses end the graph: backward
only multiplies. `model/losses.py` is the plain reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from adclr.system import triton_available

CHUNK_BYTES = 512 * 2**20  # of logits at once, teacher's and student's


class Part(NamedTuple):
    """One loss over `items` (images, queries or masked patches), each with its teacher rows and student rows.

    Without weights it is `losses.paired_loss`: two teacher rows and `views` student rows of each item, ordered by view.
    With weights it is `losses.masked_loss`: one row of each. Without items it is 0.
    """

    items: int
    views: int
    center: Tensor  # K
    coefficient: float  # of this loss in the total
    weights: Tensor | None = None

    @property
    def paired(self) -> bool:
        """Whether the loss is over pairs of views."""
        return self.weights is None

    @property
    def student_rows(self) -> int:
        """Number of student rows."""
        return self.items * self.views

    @property
    def teacher_rows(self) -> int:
        """Number of teacher rows."""
        return self.items * (2 if self.paired else 1)


class Result(NamedTuple):
    """The losses; only `total` has a gradient."""

    total: Tensor
    losses: tuple[Tensor, ...]  # of each part
    entropy: Tensor  # mean of the targets of the first part, as a share of log K


def fits(images: Tensor) -> bool:
    """Return whether the kernels can be used for these images: on a GPU, with Triton, not in float64."""
    return triton_available.possible and images.is_cuda and images.dtype != torch.float64


def head_loss(
    student: Tensor,
    prototypes: Tensor,
    teacher: Tensor,
    teacher_prototypes: Tensor,
    parts: Sequence[Part],
    student_temperature: float,
    teacher_temperature: float,
) -> Result:
    """Return the losses of rows×256 projections of unit length, part after part, under K×256 prototypes.

    Under autocast the logits are float16 even if the network is bfloat16. They are cosines, times a gain near 1, and
    need precision more than range: divided by the temperature, the rounding of bfloat16, 2^-9, becomes 0.05.
    """
    half = torch.is_autocast_enabled(student.device.type) or student.dtype != torch.float32
    dtype = torch.float16 if half else torch.float32
    temperatures = (student_temperature, teacher_temperature)
    with_grad = torch.is_grad_enabled()
    with torch.autocast(student.device.type, enabled=False):
        total, losses, entropy = _HeadLoss.apply(
            student, prototypes, teacher, teacher_prototypes, tuple(parts), temperatures, dtype, with_grad
        )
    return Result(total, losses.unbind(), entropy)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        prototypes: Tensor,
        teacher: Tensor,
        teacher_prototypes: Tensor,
        parts: tuple[Part, ...],
        temperatures: tuple[float, float],
        dtype: torch.dtype,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_grad = ctx.needs_input_grad[:2] if with_grad else (False, False)
        chunks = _Chunks(student, prototypes, teacher, teacher_prototypes, temperatures, dtype, needs_grad)
        losses, entropies, student_start, teacher_start = [], [], 0, 0
        for part in parts:
            loss, entropy = chunks.add_part(part, student_start, teacher_start)
            losses.append(loss)
            entropies.append(entropy)
            student_start, teacher_start = student_start + part.student_rows, teacher_start + part.teacher_rows
        assert (student_start, teacher_start) == (len(student), len(teacher))
        total = torch.stack([part.coefficient * loss for part, loss in zip(parts, losses, strict=True)]).sum()
        stacked, entropy = torch.stack(losses), entropies[0]
        ctx.save_for_backward(
            None if chunks.student_grad is None else chunks.student_grad.to(student.dtype),
            None if chunks.prototypes_grad is None else chunks.prototypes_grad.to(prototypes.dtype),
        )
        ctx.mark_non_differentiable(stacked, entropy)
        return total, stacked, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None if saved is None else saved * grad for saved in ctx.saved_tensors)
        return (*gradients, None, None, None, None, None, None)


class _Chunks:
    """Rows and prototypes in the type of the logits, and the gradients that the chunks add to."""

    def __init__(
        self,
        student: Tensor,
        prototypes: Tensor,
        teacher: Tensor,
        teacher_prototypes: Tensor,
        temperatures: tuple[float, float],
        dtype: torch.dtype,
        needs_grad: tuple[bool, bool],
    ) -> None:
        self.student, self.prototypes = student.to(dtype), prototypes.to(dtype)
        self.teacher, self.teacher_prototypes = teacher.to(dtype), teacher_prototypes.to(dtype)
        self.temperature = temperatures[0]
        # exp(z / temperature) is computed as 2^(z · scale), for which GPUs have an instruction
        student_scale, teacher_scale = (1 / (math.log(2) * temperature) for temperature in temperatures)
        self.scales = (teacher_scale, student_scale)
        self.student_grad, self.prototypes_grad = (
            torch.zeros(values.shape, device=values.device) if needed else None
            for values, needed in zip((student, prototypes), needs_grad, strict=True)
        )

    def add_part(self, part: Part, student_start: int, teacher_start: int) -> tuple[Tensor, Tensor]:
        """Return the loss of a part, whose rows begin at the two starts, and the entropy of its targets."""
        num_prototypes, dim = self.prototypes.shape
        loss = torch.zeros((), device=self.student.device)
        entropy = torch.zeros((), device=self.student.device)
        if part.items == 0:
            return loss, entropy
        if part.weights is None:
            assert part.views > 1
            largest = torch.full((), 1 / (2 * (part.views - 1) * part.items), device=loss.device)
            weights = torch.ones(part.items, device=loss.device)
        else:
            # relative to the largest, because float16 gradients of logits are multiplied by them
            largest = part.weights.float().max()
            weights = part.weights.float() / largest.clamp(min=torch.finfo(torch.float32).tiny)
        student_rows = slice(student_start, student_start + part.student_rows)
        students = self.student[student_rows].view(-1, part.items, dim)
        teachers = self.teacher[teacher_start : teacher_start + part.teacher_rows].view(-1, part.items, dim)
        gradients = None if self.student_grad is None else self.student_grad[student_rows].view(-1, part.items, dim)
        bytes_each = (len(students) + len(teachers)) * num_prototypes * self.student.element_size()
        chunks = math.ceil(part.items / max(1, CHUNK_BYTES // bytes_each))
        size = math.ceil(part.items / chunks)
        for start in range(0, part.items, size):
            items = slice(start, start + size)
            chunk_loss, chunk_entropy = self._add_chunk(
                part,
                students[:, items].flatten(0, 1),
                teachers[:, items].flatten(0, 1),
                weights[items],
                part.coefficient * largest,
                None if gradients is None else gradients[:, items],
            )
            loss, entropy = loss + chunk_loss, entropy + chunk_entropy
        return loss * largest, entropy / (part.teacher_rows * math.log(num_prototypes))

    def _add_chunk(
        self, part: Part, student: Tensor, teacher: Tensor, weights: Tensor, factor: Tensor, gradients: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of weighted H and of the targets' entropy, and add the gradients. Frees its logits."""
        from adclr.model.ops import head_loss_kernels as kernels

        items, device = len(weights), weights.device
        logits, teacher_logits = student @ self.prototypes.t(), teacher @ self.teacher_prototypes.t()
        blocks = kernels.num_blocks(logits.shape[1])
        teacher_stats = torch.empty(4, len(teacher), blocks, device=device)
        student_stats = torch.empty(2, len(student), blocks, device=device)
        tensors = (teacher_logits, part.center, logits, teacher_stats, student_stats)
        kernels.statistics(*tensors, self.scales, items, part.paired)

        # the sums of a block are relative to its own largest logit
        maxima, powers, factors = _combine_blocks(teacher_stats[0], self.scales[0])
        sums = (factors * teacher_stats[1]).sum(dim=-1)
        weighted_powers = (factors * (teacher_stats[2] + powers * teacher_stats[1])).sum(dim=-1)
        entropy = sums.log() - weighted_powers / sums * math.log(2)
        products = (factors * teacher_stats[3]).sum(dim=-1) / sums
        student_maxima, _, student_factors = _combine_blocks(student_stats[0], self.scales[1])
        student_sums = (student_factors * student_stats[1]).sum(dim=-1)
        # H(t, z) = (sum of t) log sum exp(z / tau) - t · z / tau; the teacher's own views have one target, not two
        log_sums = (student_maxima / self.temperature + student_sums.log()).view(-1, items)
        if part.paired:
            log_sums = 2 * log_sums.sum(dim=0) - log_sums[:2].sum(dim=0)
        h = log_sums.view(items) - products.view(-1, items).sum(dim=0) / self.temperature
        loss = (h * weights).sum()

        if part.coefficient and (gradients is not None or self.prototypes_grad is not None):
            teacher_softmax = torch.stack([maxima, 1 / sums])
            student_softmax = torch.stack([student_maxima, 1 / student_sums])
            inputs = (teacher_logits, part.center, logits, teacher_softmax, student_softmax, weights)
            kernels.gradient(*inputs, self.scales, items, part.paired)
            factor = factor / (self.temperature * kernels.SCALE)
            if gradients is not None:
                gradients.copy_((_product(logits, self.prototypes) * factor).view_as(gradients))
            if self.prototypes_grad is not None:
                self.prototypes_grad.addcmul_(_product(logits.t(), student), factor)
        return loss, entropy.sum()


def _combine_blocks(block_maxima: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """rows×blocks -> (maximum of each row; (block's maximum - row's) · scale; 2 to that power)."""
    maxima = block_maxima.amax(dim=-1)
    powers = (block_maxima - maxima.unsqueeze(-1)) * scale
    return maxima, powers, powers.exp2()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a·b in float32, also of float16 matrices: float16 is too coarse for its sums."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
