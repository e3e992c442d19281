"""The kernels of `fused`: what a chunk of teacher and student logits says, and its gradient, each logit read once.

A program has one item (an image, a query or a masked patch) and one block of prototypes. It holds the teacher's rows of
that block and goes through the student's, so each logit is read once by each kernel. All arithmetic is in float32,
whatever the logits are; no two programs write to one place, so the results are the same to the bit every time.

An item's rows are `items` apart: row = view · items + item. An item that is PAIRED has two teacher rows, and a
student's row learns from those of other views; one that is not has one row of each, and learns from it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# (prototypes a program has at once, its warps), for `benchmarks/loss.py` to tune. A single warp sums up without waiting
# for others; where there is nothing to sum up, more of them keep more loads on their way.
STATISTICS, GRADIENT = (512, 1), (2048, 4)

# The gradient of a logit lies in -2..2, and most lie near 1 / K: float16 has normal numbers down to 6e-5 only, so they
# are written multiplied by this.
SCALE = 1024.0


@triton.jit
def _row(logits, row, k, inside, K):
    """One block of a row; outside -inf, of which the exponential is 0."""
    return tl.load(logits + row * K + k, mask=inside, other=-float("inf"))


@triton.jit
def _teacher_sums(logits, middle, total, out, place, step, inside, sharp):
    """The block's largest logit, sum of e, sum of e log2 e and sum of e · total, at `place`, each `step` on."""
    logits = logits.to(tl.float32) - middle
    top = tl.max(logits, axis=0)
    power = (logits - top) * sharp
    e = tl.exp2(power)
    tl.store(out + place, top)
    tl.store(out + place + step, tl.sum(e, axis=0))
    tl.store(out + place + 2 * step, tl.sum(e * tl.where(inside, power, 0.0), axis=0))
    tl.store(out + place + 3 * step, tl.sum(e * tl.where(inside, total, 0.0), axis=0))


@triton.jit(do_not_specialize=["items"])
def _statistics(
    teacher,
    center,
    student,
    taught,
    studied,
    teacher_sharp,
    student_sharp,
    items,
    K,
    VIEWS: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """taught[4, teacher rows, blocks] and studied[2, student rows, blocks] (largest logit, sum of e).

    H is linear in the target, so of the cross-entropies with one teacher row only its product with the sum of the
    student's rows is needed: one sum over prototypes for each teacher row instead of one for each pair.
    """
    blocks = tl.cdiv(K, BLOCK)
    item, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    k = block * BLOCK + tl.arange(0, BLOCK)
    inside = k < K
    # every row is asked for before the one in front of it is needed: the sums of a row would have all warps wait
    ahead = _row(student, item, k, inside, K)
    one = _row(teacher, item, k, inside, K)
    if PAIRED:
        two = _row(teacher, items + item, k, inside, K)
    middle = tl.load(center + k, mask=inside, other=0.0)
    for_one = tl.zeros((BLOCK,), tl.float32)
    for_two = tl.zeros((BLOCK,), tl.float32)
    step = VIEWS * items.to(tl.int64) * blocks
    for view in range(VIEWS):
        z = ahead.to(tl.float32)
        ahead = _row(student, (view + 1) * items + item, k, inside & (view + 1 < VIEWS), K)
        top = tl.max(z, axis=0)
        place = (view * items + item) * blocks + block
        tl.store(studied + place, top)
        tl.store(studied + step + place, tl.sum(tl.exp2((z - top) * student_sharp), axis=0))
        for_one += tl.where(PAIRED & (view == 0), 0.0, z)
        for_two += tl.where(view == 1, 0.0, z)
    if PAIRED:
        step = 2 * items.to(tl.int64) * blocks
        _teacher_sums(two, middle, for_two, taught, (items + item) * blocks + block, step, inside, teacher_sharp)
    else:
        step = items.to(tl.int64) * blocks
    _teacher_sums(one, middle, for_one, taught, item * blocks + block, step, inside, teacher_sharp)


@triton.jit
def _softmax(logits, table, row, rows, sharp):
    """Probabilities of one block; the table has the largest logits, then 1 / the sums of e."""
    return tl.exp2((logits - tl.load(table + row)) * sharp) * tl.load(table + rows + row)


@triton.jit(do_not_specialize=["items"], do_not_specialize_on_alignment=["weights"])
def _gradient(
    teacher,
    center,
    student,
    taught,
    studied,
    weights,
    teacher_sharp,
    student_sharp,
    items,
    K,
    VIEWS: tl.constexpr,
    PAIRED: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(sum of targets · softmax(z) - targets) · weight · SCALE over the student's logits."""
    blocks = tl.cdiv(K, BLOCK)
    item, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    k = block * BLOCK + tl.arange(0, BLOCK)
    inside = k < K
    ahead = _row(student, item, k, inside, K)
    weight = tl.load(weights + item) * SCALE
    middle = tl.load(center + k, mask=inside, other=0.0)
    one = _row(teacher, item, k, inside, K).to(tl.float32) - middle
    if PAIRED:
        other = items + item
        two = _row(teacher, other, k, inside, K).to(tl.float32) - middle
        one = _softmax(one, taught, item, 2 * items, teacher_sharp)
        two = _softmax(two, taught, other, 2 * items, teacher_sharp)
    else:
        one = _softmax(one, taught, item, items, teacher_sharp)
        two = tl.zeros((BLOCK,), tl.float32)
    for view in range(VIEWS):
        row = view * items + item
        z = ahead.to(tl.float32)
        # before the store below, after which it could not be seen to be another row
        ahead = _row(student, row + items, k, inside & (view + 1 < VIEWS), K)
        use_one, use_two = tl.where(PAIRED & (view == 0), 0.0, 1.0), tl.where(PAIRED & (view != 1), 1.0, 0.0)
        found = (use_one + use_two) * _softmax(z, studied, row, VIEWS * items, student_sharp)
        found -= use_one * one + use_two * two
        tl.store(student + row * K + k, (found * weight).to(student.dtype.element_ty), mask=inside)


def num_blocks(num_prototypes: int) -> int:
    """In how many blocks `statistics` sees a row."""
    return -(-num_prototypes // STATISTICS[0])


def statistics(
    teacher: Tensor,
    center: Tensor,
    student: Tensor,
    taught: Tensor,
    studied: Tensor,
    sharps: tuple[float, float],
    items: int,
    paired: bool,
) -> None:
    """Fills taught, 4×teacher rows×blocks, and studied, 2×student rows×blocks."""
    num_prototypes = student.shape[1]
    _statistics[(items * num_blocks(num_prototypes),)](
        teacher,
        center,
        student,
        taught,
        studied,
        *sharps,
        items,
        num_prototypes,
        VIEWS=len(student) // items,
        PAIRED=paired,
        BLOCK=STATISTICS[0],
        num_warps=STATISTICS[1],
    )


def gradient(
    teacher: Tensor,
    center: Tensor,
    student: Tensor,
    taught: Tensor,
    studied: Tensor,
    weights: Tensor,
    sharps: tuple[float, float],
    items: int,
    paired: bool,
) -> None:
    """Writes SCALE times the gradient over the student's logits; taught and studied are 2×rows, as `_softmax` reads."""
    num_prototypes = student.shape[1]
    _gradient[(items * triton.cdiv(num_prototypes, GRADIENT[0]),)](
        teacher,
        center,
        student,
        taught,
        studied,
        weights,
        *sharps,
        items,
        num_prototypes,
        VIEWS=len(student) // items,
        PAIRED=paired,
        SCALE=SCALE,
        BLOCK=GRADIENT[0],
        num_warps=GRADIENT[1],
    )
