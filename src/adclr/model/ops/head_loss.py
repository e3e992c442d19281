"""The head's last layer and the losses in one, without a matrix of rows × K that outlives its use.

K is large: logits in float32 for the rows of 256 images are gigabytes, and softmax, target and gradient are as large
again. Here the logits of a chunk of items are made, read twice and turned into their own gradient where they lie; what
is kept for backward is the gradient of the rows and of the prototypes. It can be known in forward because the losses
are the end of the graph: backward only multiplies. `losses` says the same in plain operations, and is the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from adclr.system import triton_available

CHUNK_BYTES = 512 * 2**20  # of logits at once, teacher's and student's; to be tuned


class Part(NamedTuple):
    """One loss: `items` (images, queries or masked patches), each with its rows of teacher and student.

    Without weights it is `losses.paired_loss`: two teacher rows and `views` student rows of each item, ordered by view.
    With weights it is `losses.masked_loss`: one row of each. Without items it is 0.
    """

    items: int
    views: int
    center: Tensor  # K
    coefficient: float  # in the total
    weights: Tensor | None = None

    @property
    def paired(self) -> bool:
        return self.weights is None

    @property
    def student_rows(self) -> int:
        return self.items * self.views

    @property
    def teacher_rows(self) -> int:
        return self.items * (2 if self.paired else 1)


class Compared(NamedTuple):
    total: Tensor  # the only one with a gradient
    losses: tuple[Tensor, ...]  # of each part
    entropy: Tensor  # the mean of the teacher rows' of the first part, of log K


def possible(images: Tensor) -> bool:
    """Whether the kernels can work on what these images become: on a GPU, with Triton; float64 is for plain code."""
    return triton_available.possible and images.is_cuda and images.dtype != torch.float64


def compare(
    student: Tensor,
    prototypes: Tensor,
    teacher: Tensor,
    teacher_prototypes: Tensor,
    parts: Sequence[Part],
    student_temperature: float,
    teacher_temperature: float,
) -> Compared:
    """Losses of projected rows (R×D of length 1, part after part) under the prototypes (K×D) of each branch.

    Under autocast the logits are float16 although the network is bfloat16: they are cosines (times a gain near 1) that
    need no range, and a bit too few is multiplied by 1 / temperature: 2^-9, the rounding of bfloat16, becomes 0.05.
    """
    low = torch.is_autocast_enabled(student.device.type) or student.dtype != torch.float32
    dtype = torch.float16 if low else torch.float32
    temperatures = (student_temperature, teacher_temperature)
    graph = torch.is_grad_enabled()
    with torch.autocast(student.device.type, enabled=False):
        total, losses, entropy = _Compare.apply(
            student, prototypes, teacher, teacher_prototypes, tuple(parts), temperatures, dtype, graph
        )
    return Compared(total, losses.unbind(), entropy)


class _Compare(torch.autograd.Function):
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
        graph: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needed = ctx.needs_input_grad[:2] if graph else (False, False)
        work = _Work(student, prototypes, teacher, teacher_prototypes, temperatures, dtype, needed)
        losses, entropies, own, taught = [], [], 0, 0
        for part in parts:
            loss, entropy = work.part(part, own, taught)
            losses.append(loss)
            entropies.append(entropy)
            own, taught = own + part.student_rows, taught + part.teacher_rows
        assert (own, taught) == (len(student), len(teacher))
        total = torch.stack([part.coefficient * loss for part, loss in zip(parts, losses, strict=True)]).sum()
        stacked, entropy = torch.stack(losses), entropies[0]
        ctx.save_for_backward(
            None if work.for_student is None else work.for_student.to(student.dtype),
            None if work.for_prototypes is None else work.for_prototypes.to(prototypes.dtype),
        )
        ctx.mark_non_differentiable(stacked, entropy)
        return total, stacked, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None if saved is None else saved * upstream for saved in ctx.saved_tensors)
        return (*gradients, None, None, None, None, None, None)


class _Work:
    """What the chunks of one call share, and the gradients that they add to."""

    def __init__(
        self,
        student: Tensor,
        prototypes: Tensor,
        teacher: Tensor,
        teacher_prototypes: Tensor,
        temperatures: tuple[float, float],
        dtype: torch.dtype,
        needed: tuple[bool, bool],
    ) -> None:
        self.student, self.prototypes = student.to(dtype), prototypes.to(dtype)
        self.teacher, self.teacher_prototypes = teacher.to(dtype), teacher_prototypes.to(dtype)
        self.temperature = temperatures[0]
        # e is made as a power of 2, which is what processors have
        student_sharp, teacher_sharp = (1 / (math.log(2) * temperature) for temperature in temperatures)
        self.sharps = (teacher_sharp, student_sharp)
        self.for_student, self.for_prototypes = (
            torch.zeros(values.shape, device=values.device) if need else None
            for values, need in zip((student, prototypes), needed, strict=True)
        )

    def part(self, part: Part, own: int, taught: int) -> tuple[Tensor, Tensor]:
        """Its loss and the entropy of its targets; its rows start at `own` and `taught`."""
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
            # of the largest, because the gradients of logits are weighted in float16
            largest = part.weights.float().max()
            weights = part.weights.float() / largest.clamp(min=torch.finfo(torch.float32).tiny)
        students = self.student[own : own + part.student_rows].view(-1, part.items, dim)
        teachers = self.teacher[taught : taught + part.teacher_rows].view(-1, part.items, dim)
        gradients = None
        if self.for_student is not None:
            gradients = self.for_student[own : own + part.student_rows].view(-1, part.items, dim)
        bytes_each = (len(students) + len(teachers)) * num_prototypes * self.student.element_size()
        chunks = math.ceil(part.items / max(1, CHUNK_BYTES // bytes_each))
        size = math.ceil(part.items / chunks)
        for start in range(0, part.items, size):
            here = slice(start, start + size)
            found = self.chunk(
                part,
                students[:, here].flatten(0, 1),
                teachers[:, here].flatten(0, 1),
                weights[here],
                part.coefficient * largest,
                None if gradients is None else gradients[:, here],
            )
            loss, entropy = loss + found[0], entropy + found[1]
        return loss * largest, entropy / (part.teacher_rows * math.log(num_prototypes))

    def chunk(
        self, part: Part, student: Tensor, teacher: Tensor, weights: Tensor, factor: Tensor, gradients: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sums of weighted H and of the targets' entropy; the gradients are added. Its logits live as long as this."""
        from adclr.model.ops import head_loss_kernels as kernels

        items, device = len(weights), weights.device
        logits, answers = student @ self.prototypes.t(), teacher @ self.teacher_prototypes.t()
        blocks = kernels.num_blocks(logits.shape[1])
        taught = torch.empty(4, len(teacher), blocks, device=device)
        studied = torch.empty(2, len(student), blocks, device=device)
        kernels.statistics(answers, part.center, logits, taught, studied, self.sharps, items, part.paired)

        # blocks are put together: the sums of each are relative to its own largest logit
        top, powers, shares = _together(taught[0], self.sharps[0])
        sums = (shares * taught[1]).sum(dim=-1)
        entropy = sums.log() - (shares * (taught[2] + powers * taught[1])).sum(dim=-1) / sums * math.log(2)
        products = (shares * taught[3]).sum(dim=-1) / sums
        own_top, _, own_shares = _together(studied[0], self.sharps[1])
        own_sums = (own_shares * studied[1]).sum(dim=-1)
        # H(t, z) = (sum of t) log sum exp(z / tau) - t · z / tau; the teacher's own views have one target, not two
        normalisers = (own_top / self.temperature + own_sums.log()).view(-1, items)
        if part.paired:
            normalisers = 2 * normalisers.sum(dim=0) - normalisers[:2].sum(dim=0)
        h = normalisers.view(items) - products.view(-1, items).sum(dim=0) / self.temperature
        loss = (h * weights).sum()

        if part.coefficient and (gradients is not None or self.for_prototypes is not None):
            told, own = torch.stack([top, 1 / sums]), torch.stack([own_top, 1 / own_sums])
            kernels.gradient(answers, part.center, logits, told, own, weights, self.sharps, items, part.paired)
            factor = factor / (self.temperature * kernels.SCALE)
            if gradients is not None:
                gradients.copy_((_product(logits, self.prototypes) * factor).view_as(gradients))
            if self.for_prototypes is not None:
                self.for_prototypes.addcmul_(_product(logits.t(), student), factor)
        return loss, entropy.sum()


def _together(tops: Tensor, sharp: float) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logit of each row, and what every block's own lacks of it: as a power of 2, and that power of 2."""
    top = tops.amax(dim=-1)
    powers = (tops - top.unsqueeze(-1)) * sharp
    return top, powers, powers.exp2()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a·b in float32, also where a and b are float16: its sums would not do in float16."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
