"""The kernels of `mlp.py`: GELU, and GELU again with its gradient and the sums of that over the rows.

Both should take no longer than the memory traffic, which leaves about twenty instructions for a number. Arithmetic is
float32; there are no atomic sums, so that results are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tail(x):
    """Return ½ erfc(|x|/√2), the share of a normal distribution beyond |x|, as 2 to a polynomial.

    The polynomial was fitted to the logarithm on [0, 6.5], for the smallest of the larger of two errors: that of
    (1 + |x|) times the result, which is 1e-7, and the relative one, which is 1e-5 up to 3 and 1e-3 up to 6.5, where the
    result is 4e-11. In float32 it is 2e-7 off everywhere: bfloat16 rounds a GELU of 1 by 2e-3. Beyond 6.5, the first
    coefficient, which is negative, takes it to 0. It has no division and no branch: 8 FMAs and one exp2, where
    libdevice's erf chooses between two polynomials.
    """
    a = tl.abs(x)
    p = -7.644931e-07 * a + 1.365247e-05
    p = p * a - 6.132281e-05
    p = p * a - 4.400598e-04
    p = p * a + 7.454071e-03
    p = p * a - 5.275658e-02
    p = p * a - 4.591284e-01
    p = p * a - 1.151113e00
    return tl.exp2(p * a - 1.0)


@triton.jit
def _gelu(x):
    """Return x Φ(x), without a branch on the sign of x."""
    return tl.maximum(x, 0.0) - tl.abs(x) * _tail(x)


@triton.jit
def _gelu_and_derivative(x):
    """Return (x Φ(x), its derivative Φ(x) + x φ(x))."""
    q = _tail(x)
    cdf = tl.where(x > 0, 1.0 - q, q)
    density = tl.exp2(-0.7213475204444817 * x * x - 1.3257480647361592)  # log₂e / 2, log₂ √2π
    return x * cdf, cdf + x * density


@triton.jit
def _forward(hidden, out, total, NUMBERS: tl.constexpr):
    """Write GELU of `hidden` to `out`, which may be `hidden`."""
    offset = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    x = tl.load(hidden + offset, mask=offset < total).to(tl.float32)
    tl.store(out + offset, _gelu(x).to(out.dtype.element_ty), mask=offset < total)


@triton.jit
def _backward(
    hidden, grad, out, sums, rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Handle SPAN rows of COLUMNS columns, ROWS at a time: GELU to `out`, the gradient to `grad`, its sums to `sums`.

    Each thread sums its own numbers; threads combine them once, at the end.
    """
    BLOCKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS  # of columns; neighbors in memory
    span = tl.program_id(0) // BLOCKS
    column = (tl.program_id(0) % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    first = span.to(tl.int64) * SPAN
    count = tl.minimum(rows - first, SPAN).to(tl.int32)
    hidden, grad, out = hidden + first * WIDTH, grad + first * WIDTH, out + first * WIDTH
    column_sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        offset = row[:, None] * WIDTH + column[None, :]
        inside = (row < count)[:, None]
        if WIDTH % COLUMNS != 0:
            inside = inside & (column < WIDTH)[None, :]
        x = tl.load(hidden + offset, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
        g, derivative = _gelu_and_derivative(x)
        d = d * derivative
        tl.store(out + offset, g.to(out.dtype.element_ty), mask=inside)
        tl.store(grad + offset, d.to(grad.dtype.element_ty), mask=inside)
        column_sums += d  # before it is rounded
    tl.store(sums + span * WIDTH + column, tl.sum(column_sums, 0), mask=column < WIDTH)
