"""The kernel of `rotation.py`, which reads the output of the qkv layer once and writes it once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def _rotate(
    qkv, out, cosines, sines, rows,
    PERIOD: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Turn ROWS rows of queries, of keys, or copy those of values: of three programs each has one of these parts.

    A row of a part is PAIRS pairs of numbers, HALF of each head; the two of a pair are HALF apart.
    """
    part = tl.program_id(0) % 3
    row = (tl.program_id(0) // 3) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (pair < PAIRS)[None, :]
    column = pair // HALF * (2 * HALF) + pair % HALF
    offset = row.to(tl.int64)[:, None] * (6 * PAIRS) + part * (2 * PAIRS) + column[None, :]
    first = tl.load(qkv + offset, mask=inside, other=0.0)
    second = tl.load(qkv + offset + HALF, mask=inside, other=0.0)
    if part < 2:
        entry = (row % PERIOD)[:, None] * HALF + (pair % HALF)[None, :]
        cos = tl.load(cosines + entry, mask=inside, other=0.0)
        sin = tl.load(sines + entry, mask=inside, other=0.0)
        if INVERSE:
            sin = -sin
        a, b = first.to(tl.float32), second.to(tl.float32)
        first = (a * cos - b * sin).to(out.dtype.element_ty)
        second = (b * cos + a * sin).to(out.dtype.element_ty)
    tl.store(out + offset, first, mask=inside)
    tl.store(out + offset + HALF, second, mask=inside)
