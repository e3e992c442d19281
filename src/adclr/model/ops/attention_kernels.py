"""The kernels of `attention.py`, which read the output of the qkv layer and write in the same layout.

Sequences are short enough to be read about once: nothing is copied into heads, and there are no atomic sums, so that
results are deterministic. Scores are in powers of two (SCALE holds log₂e), the softmax is float32, and `lse`, the log₂
of each row's sum, is sequences×heads×tokens. Sizes are constants of a kernel: there are few, and the compiler removes
the blocks beyond a sequence.

Backward has variants, chosen by the tables of `attention.py`:

- `whole`: a sequence is one tile; the softmax is computed again, so that neither the output nor `lse` is needed.
- `rows`: a program has all keys of a sequence as one tile, with dk and dv in registers, and loops over its rows, `rows`
  at a time.
- `two`: a program has `rows` tokens of a sequence, as keys or as rows, and loops over the others, `keys` at a time. It
  computes the scores twice (7 products for 5), but is small.
"""

from __future__ import annotations

import triton
import triton.language as tl

# -- shared functions --


@triton.jit
def _load(base, row, limit, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows of one head, 0 from `limit` on."""
    offset = row[:, None] * STRIDE + tl.arange(0, WIDTH)[None, :]
    return tl.load(base + offset, mask=(row < limit)[:, None], other=0.0)


@triton.jit
def _store(base, row, limit, value, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    offset = row[:, None] * STRIDE + tl.arange(0, WIDTH)[None, :]
    tl.store(base + offset, value.to(base.dtype.element_ty), mask=(row < limit)[:, None])


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _dot_add(a, b, sums):
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def _attends(row, key, IMAGE: tl.constexpr, HIDDEN: tl.constexpr):
    """Return rows×keys: whether the row attends to the key."""
    attends = (key < IMAGE)[None, :]
    if HIDDEN > 0:
        attends = attends & ((row < IMAGE)[:, None] | (key >= HIDDEN)[None, :])
    return attends


@triton.jit
def _zero_query_keys(base, TOKENS: tl.constexpr, IMAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store 0 as the gradient of the keys and values of query tokens, which nothing attends to."""
    if IMAGE < TOKENS:
        zeros = tl.zeros((16, WIDTH), tl.float32)
        for start in tl.range(IMAGE, TOKENS, 16):
            row = start + tl.arange(0, 16)
            _store(base + DIM, row, TOKENS, zeros, 3 * DIM, WIDTH)
            _store(base + 2 * DIM, row, TOKENS, zeros, 3 * DIM, WIDTH)


# -- forward --


@triton.jit
def _attend_tile(
    q, base, row, start, largest, total, sums,
    IMAGE: tl.constexpr, HIDDEN: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Update the running softmax with one tile of keys: largest score, sum of the weights, and weighted values."""
    key = start + tl.arange(0, KEYS)
    k = _load(base + DIM, key, IMAGE, 3 * DIM, WIDTH)
    v = _load(base + 2 * DIM, key, IMAGE, 3 * DIM, WIDTH)
    s = _dot(q, tl.trans(k))
    if MASKED or HIDDEN > 0:
        s = tl.where(_attends(row, key, IMAGE, HIDDEN), s, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(s, 1) * SCALE)
    p = tl.exp2(s * SCALE - new_largest[:, None])
    rescale = tl.exp2(largest - new_largest)
    return new_largest, total * rescale + tl.sum(p, 1), _dot_add(p.to(v.dtype), v, sums * rescale[:, None])


@triton.jit
def _forward(
    qkv, out, lse,
    TOKENS: tl.constexpr, IMAGE: tl.constexpr, HIDDEN: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FULL: tl.constexpr, LAST: tl.constexpr, BLOCKS: tl.constexpr,
    HEADS_EACH: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows of HEADS_EACH heads: FULL keys in tiles of KEYS, the rest in one of LAST."""
    DIM: tl.constexpr = HEADS * WIDTH
    unit = tl.program_id(0) // BLOCKS
    row = (tl.program_id(0) % BLOCKS) * ROWS + tl.arange(0, ROWS)
    sequence = (unit // (HEADS // HEADS_EACH)).to(tl.int64)
    for index in tl.range(0, HEADS_EACH):
        head = (unit % (HEADS // HEADS_EACH)) * HEADS_EACH + index
        base = qkv + sequence * (TOKENS * 3 * DIM) + head * WIDTH
        q = _load(base, row, TOKENS, 3 * DIM, WIDTH)
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, WIDTH), tl.float32)
        if FULL > 0:
            for start in tl.range(0, FULL, KEYS):
                largest, total, sums = _attend_tile(
                    q, base, row, start, largest, total, sums, IMAGE, HIDDEN, DIM, WIDTH, SCALE, KEYS, False
                )
        largest, total, sums = _attend_tile(
            q, base, row, FULL, largest, total, sums, IMAGE, HIDDEN, DIM, WIDTH, SCALE, LAST, True
        )
        _store(out + sequence * (TOKENS * DIM) + head * WIDTH, row, TOKENS, sums / total[:, None], DIM, WIDTH)
        if KEEP:
            tl.store(lse + (sequence * HEADS + head) * TOKENS + row, largest + tl.log2(total), mask=row < TOKENS)


# -- backward --


@triton.jit
def _whole(
    grad, qkv, dqkv,
    TOKENS: tl.constexpr, IMAGE: tl.constexpr, HIDDEN: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    SLOPE: tl.constexpr, TILE: tl.constexpr, HEADS_EACH: tl.constexpr,
):  # fmt: skip
    DIM: tl.constexpr = HEADS * WIDTH
    unit = tl.program_id(0)
    row = tl.arange(0, TILE)
    sequence = (unit // (HEADS // HEADS_EACH)).to(tl.int64)
    for index in tl.range(0, HEADS_EACH):
        head = (unit % (HEADS // HEADS_EACH)) * HEADS_EACH + index
        base = qkv + sequence * (TOKENS * 3 * DIM) + head * WIDTH
        q = _load(base, row, TOKENS, 3 * DIM, WIDTH)
        k = _load(base + DIM, row, IMAGE, 3 * DIM, WIDTH)
        v = _load(base + 2 * DIM, row, IMAGE, 3 * DIM, WIDTH)
        do = _load(grad + sequence * (TOKENS * DIM) + head * WIDTH, row, TOKENS, DIM, WIDTH)
        s = tl.where(_attends(row, row, IMAGE, HIDDEN), _dot(q, tl.trans(k)), float("-inf"))
        p = tl.exp2(s * SCALE - (tl.max(s, 1) * SCALE)[:, None])
        p = p / tl.sum(p, 1)[:, None]
        dp = _dot(do, tl.trans(v))
        dv = _dot(tl.trans(p.to(q.dtype)), do)
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None])).to(q.dtype)
        dbase = dqkv + sequence * (TOKENS * 3 * DIM) + head * WIDTH
        # keys of query tokens have weights of 0, and so gradients of 0
        _store(dbase + 2 * DIM, row, TOKENS, dv, 3 * DIM, WIDTH)
        _store(dbase, row, TOKENS, _dot(ds, k) * SLOPE, 3 * DIM, WIDTH)
        _store(dbase + DIM, row, TOKENS, _dot(tl.trans(ds), q) * SLOPE, 3 * DIM, WIDTH)


@triton.jit
def _load_rows(base, grad, out, lse, row, TOKENS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return q, do, lse and Σ do·o of some rows; the gradient of the softmax subtracts the last."""
    q = _load(base, row, TOKENS, 3 * DIM, WIDTH)
    do = _load(grad, row, TOKENS, DIM, WIDTH)
    o = _load(out, row, TOKENS, DIM, WIDTH)
    return q, do, tl.load(lse + row, mask=row < TOKENS, other=0.0), tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)


@triton.jit
def _key_gradients(
    base, dbase, grad, out, lse, key,
    TOKENS: tl.constexpr, IMAGE: tl.constexpr, HIDDEN: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    SCALE: tl.constexpr, SLOPE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WITH_DQ: tl.constexpr,
):  # fmt: skip
    """Store dk and dv of KEYS keys, summed over all rows; dq too, if these are all the keys."""
    k = _load(base + DIM, key, IMAGE, 3 * DIM, WIDTH)
    v = _load(base + 2 * DIM, key, IMAGE, 3 * DIM, WIDTH)
    dk = tl.zeros((KEYS, WIDTH), tl.float32)
    dv = tl.zeros((KEYS, WIDTH), tl.float32)
    for start in tl.range(0, TOKENS, ROWS):
        row = start + tl.arange(0, ROWS)
        q, do, sums, delta = _load_rows(base, grad, out, lse, row, TOKENS, DIM, WIDTH)
        # keys×rows, so that weights and gradients of scores stay in registers as the left factor of a product
        s = _dot(k, tl.trans(q)) * SCALE - sums[None, :]
        if HIDDEN > 0:
            attends = (key < IMAGE)[:, None] & ((row < IMAGE)[None, :] | (key >= HIDDEN)[:, None])
        else:
            attends = (key < IMAGE)[:, None]
        p = tl.exp2(tl.where(attends, s, float("-inf")))
        dv = _dot_add(p.to(q.dtype), do, dv)
        ds = (p * (_dot(v, tl.trans(do)) - delta[None, :])).to(q.dtype)
        dk = _dot_add(ds, q, dk)
        if WITH_DQ:
            _store(dbase, row, TOKENS, tl.trans(_dot(tl.trans(k), ds) * SLOPE), 3 * DIM, WIDTH)
    _store(dbase + DIM, key, IMAGE, dk * SLOPE, 3 * DIM, WIDTH)
    _store(dbase + 2 * DIM, key, IMAGE, dv, 3 * DIM, WIDTH)


@triton.jit
def _rows(
    grad, qkv, out, lse, dqkv,
    TOKENS: tl.constexpr, IMAGE: tl.constexpr, HIDDEN: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    SLOPE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    DIM: tl.constexpr = HEADS * WIDTH
    sequence, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    base = qkv + sequence * (TOKENS * 3 * DIM) + head * WIDTH
    dbase = dqkv + sequence * (TOKENS * 3 * DIM) + head * WIDTH
    grad += sequence * (TOKENS * DIM) + head * WIDTH
    out += sequence * (TOKENS * DIM) + head * WIDTH
    lse += (sequence * HEADS + head) * TOKENS
    key = tl.arange(0, KEYS)
    _key_gradients(base, dbase, grad, out, lse, key, TOKENS, IMAGE, HIDDEN, DIM, WIDTH, SCALE, SLOPE, ROWS, KEYS, True)
    _zero_query_keys(dbase, TOKENS, IMAGE, DIM, WIDTH)


@triton.jit
def _two(
    grad, qkv, out, lse, dqkv,
    TOKENS: tl.constexpr, IMAGE: tl.constexpr, HIDDEN: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    SLOPE: tl.constexpr, TILE: tl.constexpr, OTHER_TILE: tl.constexpr, KEY_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Of the BLOCKS programs of a sequence and head, the first KEY_BLOCKS handle keys and the others rows."""
    DIM: tl.constexpr = HEADS * WIDTH
    unit, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    sequence, head = (unit // HEADS).to(tl.int64), unit % HEADS
    base = qkv + sequence * (TOKENS * 3 * DIM) + head * WIDTH
    dbase = dqkv + sequence * (TOKENS * 3 * DIM) + head * WIDTH
    grad += sequence * (TOKENS * DIM) + head * WIDTH
    out += sequence * (TOKENS * DIM) + head * WIDTH
    lse += (sequence * HEADS + head) * TOKENS
    if block < KEY_BLOCKS:
        key = block * TILE + tl.arange(0, TILE)
        _key_gradients(
            base, dbase, grad, out, lse, key, TOKENS, IMAGE, HIDDEN, DIM, WIDTH, SCALE, SLOPE, OTHER_TILE, TILE, False
        )
        if block == 0:
            _zero_query_keys(dbase, TOKENS, IMAGE, DIM, WIDTH)
    else:
        row = (block - KEY_BLOCKS) * TILE + tl.arange(0, TILE)
        q, do, sums, delta = _load_rows(base, grad, out, lse, row, TOKENS, DIM, WIDTH)
        dq = tl.zeros((TILE, WIDTH), tl.float32)
        for start in tl.range(0, IMAGE, OTHER_TILE):
            key = start + tl.arange(0, OTHER_TILE)
            k = _load(base + DIM, key, IMAGE, 3 * DIM, WIDTH)
            v = _load(base + 2 * DIM, key, IMAGE, 3 * DIM, WIDTH)
            s = _dot(q, tl.trans(k)) * SCALE - sums[:, None]
            p = tl.exp2(tl.where(_attends(row, key, IMAGE, HIDDEN), s, float("-inf")))
            ds = p * (_dot(do, tl.trans(v)) - delta[:, None])
            dq = _dot_add(ds.to(k.dtype), k, dq)
        _store(dbase, row, TOKENS, dq * SLOPE, 3 * DIM, WIDTH)
