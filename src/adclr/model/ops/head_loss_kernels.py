"""The kernels of `head_loss.py`: statistics of a chunk of teacher and student logits, and the gradient.

A program handles one item (an image, a query or a masked patch) and one block of prototypes. It holds the teacher rows
of that block and loops over the student rows, so each kernel reads each logit once. Arithmetic is in float32, also of
float16 logits; no two programs write to the same address, so the results are deterministic.

The rows of an item are `items` apart: row = view · items + item. A PAIRED item has two teacher rows, and a student row
learns from those of the other views; an item that is not has one row of each.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# (prototypes of a block, warps of a program), tuned with `benchmarks/loss.py`. A single warp sums without waiting for
# others; without sums, more warps keep more loads in flight.
STATISTICS, GRADIENT = (512, 1), (2048, 4)

# The gradient of a logit lies in -2..2, and most lie near 1 / K. Normal float16 numbers are at least 6e-5, so gradients
# are stored multiplied by this.
SCALE = 1024.0


@triton.jit
def _row(logits, row, k, inside, K):
    """Return one block of a row; -inf outside, of which the exponential is 0."""
    return tl.load(logits + row * K + k, mask=inside, other=-float("inf"))


@triton.jit
def _store_teacher_stats(logits, shift, total, out, offset, stride, inside, scale):
    """Store the block's largest logit, sum of e, sum of e log2 e and sum of e · total at `offset`, `stride` apart."""
    logits = logits.to(tl.float32) - shift
    largest = tl.max(logits, axis=0)
    power = (logits - largest) * scale
    e = tl.exp2(power)
    tl.store(out + offset, largest)
    tl.store(out + offset + stride, tl.sum(e, axis=0))
    tl.store(out + offset + 2 * stride, tl.sum(e * tl.where(inside, power, 0.0), axis=0))
    tl.store(out + offset + 3 * stride, tl.sum(e * tl.where(inside, total, 0.0), axis=0))


@triton.jit(do_not_specialize=["items"])
def _statistics(
    teacher, center, student, teacher_stats, student_stats, teacher_scale, student_scale, items, K,
    VIEWS: tl.constexpr, PAIRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store teacher_stats, 4×rows×blocks, and student_stats, 2×rows×blocks: largest logit and sum of e.

    H is linear in the target, so the cross-entropies with one teacher row need only its product with the sum of the
    student's rows: one sum over prototypes for each teacher row instead of one for each pair.
    """
    blocks = tl.cdiv(K, BLOCK)
    item, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    k = block * BLOCK + tl.arange(0, BLOCK)
    inside = k < K
    # each row is loaded before the previous one is used: the sums of a row make all warps wait
    next_row = _row(student, item, k, inside, K)
    first = _row(teacher, item, k, inside, K)
    if PAIRED:
        second = _row(teacher, items + item, k, inside, K)
    shift = tl.load(center + k, mask=inside, other=0.0)
    first_total = tl.zeros((BLOCK,), tl.float32)
    second_total = tl.zeros((BLOCK,), tl.float32)
    stride = VIEWS * items.to(tl.int64) * blocks
    for view in range(VIEWS):
        z = next_row.to(tl.float32)
        next_row = _row(student, (view + 1) * items + item, k, inside & (view + 1 < VIEWS), K)
        largest = tl.max(z, axis=0)
        offset = (view * items + item) * blocks + block
        tl.store(student_stats + offset, largest)
        tl.store(student_stats + stride + offset, tl.sum(tl.exp2((z - largest) * student_scale), axis=0))
        first_total += tl.where(PAIRED & (view == 0), 0.0, z)
        second_total += tl.where(view == 1, 0.0, z)
    if PAIRED:
        stride = 2 * items.to(tl.int64) * blocks
        _store_teacher_stats(
            second, shift, second_total, teacher_stats, (items + item) * blocks + block, stride, inside, teacher_scale
        )
    else:
        stride = items.to(tl.int64) * blocks
    _store_teacher_stats(first, shift, first_total, teacher_stats, item * blocks + block, stride, inside, teacher_scale)


@triton.jit
def _softmax(logits, table, row, rows, scale):
    """Return the probabilities of one block; the table has the largest logits, then 1 / the sums of e."""
    return tl.exp2((logits - tl.load(table + row)) * scale) * tl.load(table + rows + row)


@triton.jit(do_not_specialize=["items"], do_not_specialize_on_alignment=["weights"])
def _gradient(
    teacher, center, student, teacher_stats, student_stats, weights, teacher_scale, student_scale, items, K,
    VIEWS: tl.constexpr, PAIRED: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite the student's logits with (sum of targets · softmax(z) - targets) · weight · SCALE."""
    blocks = tl.cdiv(K, BLOCK)
    item, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    k = block * BLOCK + tl.arange(0, BLOCK)
    inside = k < K
    next_row = _row(student, item, k, inside, K)
    weight = tl.load(weights + item) * SCALE
    shift = tl.load(center + k, mask=inside, other=0.0)
    first = _row(teacher, item, k, inside, K).to(tl.float32) - shift
    if PAIRED:
        other = items + item
        second = _row(teacher, other, k, inside, K).to(tl.float32) - shift
        first = _softmax(first, teacher_stats, item, 2 * items, teacher_scale)
        second = _softmax(second, teacher_stats, other, 2 * items, teacher_scale)
    else:
        first = _softmax(first, teacher_stats, item, items, teacher_scale)
        second = tl.zeros((BLOCK,), tl.float32)
    for view in range(VIEWS):
        row = view * items + item
        z = next_row.to(tl.float32)
        # before the store below, after which the compiler cannot tell that it is another row
        next_row = _row(student, row + items, k, inside & (view + 1 < VIEWS), K)
        use_first, use_second = tl.where(PAIRED & (view == 0), 0.0, 1.0), tl.where(PAIRED & (view != 1), 1.0, 0.0)
        grad = (use_first + use_second) * _softmax(z, student_stats, row, VIEWS * items, student_scale)
        grad -= use_first * first + use_second * second
        tl.store(student + row * K + k, (grad * weight).to(student.dtype.element_ty), mask=inside)


def num_blocks(num_prototypes: int) -> int:
    """Return the number of blocks into which `statistics` splits a row."""
    return -(-num_prototypes // STATISTICS[0])


def statistics(
    teacher: Tensor,
    center: Tensor,
    student: Tensor,
    teacher_stats: Tensor,
    student_stats: Tensor,
    scales: tuple[float, float],
    items: int,
    paired: bool,
) -> None:
    """Fill teacher_stats, 4×rows×blocks, and student_stats, 2×rows×blocks."""
    num_prototypes, (block, warps) = student.shape[1], STATISTICS
    arguments = (teacher, center, student, teacher_stats, student_stats, *scales, items, num_prototypes)
    _statistics[(items * num_blocks(num_prototypes),)](
        *arguments, VIEWS=len(student) // items, PAIRED=paired, BLOCK=block, num_warps=warps
    )


def gradient(
    teacher: Tensor,
    center: Tensor,
    student: Tensor,
    teacher_stats: Tensor,
    student_stats: Tensor,
    weights: Tensor,
    scales: tuple[float, float],
    items: int,
    paired: bool,
) -> None:
    """Overwrite the student's logits with SCALE times their gradient; the stats are 2×rows, the table of `_softmax`."""
    num_prototypes, (block, warps) = student.shape[1], GRADIENT
    arguments = (teacher, center, student, teacher_stats, student_stats, weights, *scales, items, num_prototypes)
    _gradient[(items * triton.cdiv(num_prototypes, block),)](
        *arguments, VIEWS=len(student) // items, PAIRED=paired, SCALE=SCALE, BLOCK=block, num_warps=warps
    )
