"""The kernels of `attention.py`, straight from the rows of the qkv layer and back to them.

A sequence is short enough to be read about once: there is no copy into heads, no pass beside the kernel, and no atomic
sum, so that the same numbers give the same bits. Scores are in powers of two (SCALE holds log₂e), the softmax is
float32, and `lse`, the log₂ of each row's sum, lies as sequence × head × token. Sizes are constants of a kernel: there
are few, and blocks beyond a sequence are then left out when it is compiled.

Backward comes in variants; the tables of `attention.py` choose:

- `whole`: a sequence is one tile; the softmax is made again, so that neither the output nor `lse` is needed.
- `rows`: a program has all keys of a sequence as one tile, with dk and dv in registers, and goes over its rows, `rows`
  at a time.
- `two`: a program has `rows` tokens of a sequence, as keys or as rows, and goes over the others, `keys` at a time. It
  computes the scores twice (7 products for 5), but is small.
"""

from __future__ import annotations

import triton
import triton.language as tl

# -- what the kernels share --


@triton.jit
def _tile(at, row, limit, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of one head, 0 from `limit` on."""
    place = row[:, None] * STRIDE + tl.arange(0, WIDTH)[None, :]
    return tl.load(at + place, mask=(row < limit)[:, None], other=0.0)


@triton.jit
def _put(at, row, limit, value, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    place = row[:, None] * STRIDE + tl.arange(0, WIDTH)[None, :]
    tl.store(at + place, value.to(at.dtype.element_ty), mask=(row < limit)[:, None])


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _add(a, b, sums):
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def _answers(row, key, IMAGE: tl.constexpr, HIDDEN: tl.constexpr):
    """Rows × keys: whether the key answers the row."""
    answers = (key < IMAGE)[None, :]
    if HIDDEN > 0:
        answers = answers & ((row < IMAGE)[:, None] | (key >= HIDDEN)[None, :])
    return answers


@triton.jit
def _silence(at, TOKENS: tl.constexpr, IMAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """No gradient for the keys and values of the tokens that do not answer."""
    if IMAGE < TOKENS:
        nothing = tl.zeros((16, WIDTH), tl.float32)
        for start in tl.range(IMAGE, TOKENS, 16):
            row = start + tl.arange(0, 16)
            _put(at + DIM, row, TOKENS, nothing, 3 * DIM, WIDTH)
            _put(at + 2 * DIM, row, TOKENS, nothing, 3 * DIM, WIDTH)


# -- forward --


@triton.jit
def _read(
    q, at, row, start, top, total, sums,
    IMAGE: tl.constexpr, HIDDEN: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr,
    KEYS: tl.constexpr, PARTLY: tl.constexpr,
):  # fmt: skip
    """Rows read some keys: the largest score so far, the sum of the weights, and the weighted values."""
    key = start + tl.arange(0, KEYS)
    k = _tile(at + DIM, key, IMAGE, 3 * DIM, WIDTH)
    v = _tile(at + 2 * DIM, key, IMAGE, 3 * DIM, WIDTH)
    s = _dot(q, tl.trans(k))
    if PARTLY or HIDDEN > 0:
        s = tl.where(_answers(row, key, IMAGE, HIDDEN), s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, 1) * SCALE)
    p = tl.exp2(s * SCALE - higher[:, None])
    fade = tl.exp2(top - higher)
    return higher, total * fade + tl.sum(p, 1), _add(p.to(v.dtype), v, sums * fade[:, None])


@triton.jit
def _forward(
    qkv, out, lse,
    TOKENS: tl.constexpr, IMAGE: tl.constexpr, HIDDEN: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FULL: tl.constexpr, LAST: tl.constexpr, BLOCKS: tl.constexpr,
    PER: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """A block of rows of PER heads of a sequence: FULL keys in tiles of KEYS, the rest in one of LAST."""
    DIM: tl.constexpr = HEADS * WIDTH
    unit = tl.program_id(0) // BLOCKS
    row = (tl.program_id(0) % BLOCKS) * ROWS + tl.arange(0, ROWS)
    sequence = (unit // (HEADS // PER)).to(tl.int64)
    for number in tl.range(0, PER):
        head = (unit % (HEADS // PER)) * PER + number
        at = qkv + sequence * (TOKENS * 3 * DIM) + head * WIDTH
        q = _tile(at, row, TOKENS, 3 * DIM, WIDTH)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, WIDTH), tl.float32)
        if FULL > 0:
            for start in tl.range(0, FULL, KEYS):
                top, total, sums = _read(
                    q, at, row, start, top, total, sums, IMAGE, HIDDEN, DIM, WIDTH, SCALE, KEYS, False
                )
        top, total, sums = _read(q, at, row, FULL, top, total, sums, IMAGE, HIDDEN, DIM, WIDTH, SCALE, LAST, True)
        _put(out + sequence * (TOKENS * DIM) + head * WIDTH, row, TOKENS, sums / total[:, None], DIM, WIDTH)
        if KEEP:
            tl.store(lse + (sequence * HEADS + head) * TOKENS + row, top + tl.log2(total), mask=row < TOKENS)


# -- backward --


@triton.jit
def _whole(
    grad, qkv, dqkv,
    TOKENS: tl.constexpr, IMAGE: tl.constexpr, HIDDEN: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    SLOPE: tl.constexpr, TILE: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    DIM: tl.constexpr = HEADS * WIDTH
    unit = tl.program_id(0)
    row = tl.arange(0, TILE)
    sequence = (unit // (HEADS // PER)).to(tl.int64)
    for number in tl.range(0, PER):
        head = (unit % (HEADS // PER)) * PER + number
        at = qkv + sequence * (TOKENS * 3 * DIM) + head * WIDTH
        q = _tile(at, row, TOKENS, 3 * DIM, WIDTH)
        k = _tile(at + DIM, row, IMAGE, 3 * DIM, WIDTH)
        v = _tile(at + 2 * DIM, row, IMAGE, 3 * DIM, WIDTH)
        do = _tile(grad + sequence * (TOKENS * DIM) + head * WIDTH, row, TOKENS, DIM, WIDTH)
        s = tl.where(_answers(row, row, IMAGE, HIDDEN), _dot(q, tl.trans(k)), float("-inf"))
        p = tl.exp2(s * SCALE - (tl.max(s, 1) * SCALE)[:, None])
        p = p / tl.sum(p, 1)[:, None]
        dp = _dot(do, tl.trans(v))
        dv = _dot(tl.trans(p.to(q.dtype)), do)
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None])).to(q.dtype)
        back = dqkv + sequence * (TOKENS * 3 * DIM) + head * WIDTH
        # tokens that do not answer have weights of 0, and so gradients of 0
        _put(back + 2 * DIM, row, TOKENS, dv, 3 * DIM, WIDTH)
        _put(back, row, TOKENS, _dot(ds, k) * SLOPE, 3 * DIM, WIDTH)
        _put(back + DIM, row, TOKENS, _dot(tl.trans(ds), q) * SLOPE, 3 * DIM, WIDTH)


@triton.jit
def _asking(at, grad, out, lse, row, TOKENS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Of some rows: q, do, lse, and Σ do·o, which is what the softmax takes off each gradient of a score."""
    q = _tile(at, row, TOKENS, 3 * DIM, WIDTH)
    do = _tile(grad, row, TOKENS, DIM, WIDTH)
    o = _tile(out, row, TOKENS, DIM, WIDTH)
    return q, do, tl.load(lse + row, mask=row < TOKENS, other=0.0), tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)


@triton.jit
def _asked(
    at, back, grad, out, lse, key,
    TOKENS: tl.constexpr, IMAGE: tl.constexpr, HIDDEN: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    SCALE: tl.constexpr, SLOPE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """dk and dv of KEYS keys, over all rows; dq too, where these are all the keys."""
    k = _tile(at + DIM, key, IMAGE, 3 * DIM, WIDTH)
    v = _tile(at + 2 * DIM, key, IMAGE, 3 * DIM, WIDTH)
    dk = tl.zeros((KEYS, WIDTH), tl.float32)
    dv = tl.zeros((KEYS, WIDTH), tl.float32)
    for start in tl.range(0, TOKENS, ROWS):
        row = start + tl.arange(0, ROWS)
        q, do, sums, delta = _asking(at, grad, out, lse, row, TOKENS, DIM, WIDTH)
        # keys × rows, so that weights and gradients of scores can stay in registers as the left side of a product
        s = _dot(k, tl.trans(q)) * SCALE - sums[None, :]
        if HIDDEN > 0:
            answers = (key < IMAGE)[:, None] & ((row < IMAGE)[None, :] | (key >= HIDDEN)[:, None])
        else:
            answers = (key < IMAGE)[:, None]
        p = tl.exp2(tl.where(answers, s, float("-inf")))
        dv = _add(p.to(q.dtype), do, dv)
        ds = (p * (_dot(v, tl.trans(do)) - delta[None, :])).to(q.dtype)
        dk = _add(ds, q, dk)
        if ALL:
            _put(back, row, TOKENS, tl.trans(_dot(tl.trans(k), ds) * SLOPE), 3 * DIM, WIDTH)
    _put(back + DIM, key, IMAGE, dk * SLOPE, 3 * DIM, WIDTH)
    _put(back + 2 * DIM, key, IMAGE, dv, 3 * DIM, WIDTH)


@triton.jit
def _rows(
    grad, qkv, out, lse, dqkv,
    TOKENS: tl.constexpr, IMAGE: tl.constexpr, HIDDEN: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    SLOPE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    DIM: tl.constexpr = HEADS * WIDTH
    sequence, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    at = qkv + sequence * (TOKENS * 3 * DIM) + head * WIDTH
    back = dqkv + sequence * (TOKENS * 3 * DIM) + head * WIDTH
    grad += sequence * (TOKENS * DIM) + head * WIDTH
    out += sequence * (TOKENS * DIM) + head * WIDTH
    lse += (sequence * HEADS + head) * TOKENS
    key = tl.arange(0, KEYS)
    _asked(at, back, grad, out, lse, key, TOKENS, IMAGE, HIDDEN, DIM, WIDTH, SCALE, SLOPE, ROWS, KEYS, True)
    _silence(back, TOKENS, IMAGE, DIM, WIDTH)


@triton.jit
def _two(
    grad, qkv, out, lse, dqkv,
    TOKENS: tl.constexpr, IMAGE: tl.constexpr, HIDDEN: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    SLOPE: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr, ASKED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Of the BLOCKS programs of a sequence and head the first ASKED have keys and the others rows."""
    DIM: tl.constexpr = HEADS * WIDTH
    unit, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    sequence, head = (unit // HEADS).to(tl.int64), unit % HEADS
    at = qkv + sequence * (TOKENS * 3 * DIM) + head * WIDTH
    back = dqkv + sequence * (TOKENS * 3 * DIM) + head * WIDTH
    grad += sequence * (TOKENS * DIM) + head * WIDTH
    out += sequence * (TOKENS * DIM) + head * WIDTH
    lse += (sequence * HEADS + head) * TOKENS
    if block < ASKED:
        key = block * OWN + tl.arange(0, OWN)
        _asked(at, back, grad, out, lse, key, TOKENS, IMAGE, HIDDEN, DIM, WIDTH, SCALE, SLOPE, OTHERS, OWN, False)
        if block == 0:
            _silence(back, TOKENS, IMAGE, DIM, WIDTH)
    else:
        row = (block - ASKED) * OWN + tl.arange(0, OWN)
        q, do, sums, delta = _asking(at, grad, out, lse, row, TOKENS, DIM, WIDTH)
        dq = tl.zeros((OWN, WIDTH), tl.float32)
        for start in tl.range(0, IMAGE, OTHERS):
            key = start + tl.arange(0, OTHERS)
            k = _tile(at + DIM, key, IMAGE, 3 * DIM, WIDTH)
            v = _tile(at + 2 * DIM, key, IMAGE, 3 * DIM, WIDTH)
            s = _dot(q, tl.trans(k)) * SCALE - sums[:, None]
            p = tl.exp2(tl.where(_answers(row, key, IMAGE, HIDDEN), s, float("-inf")))
            ds = p * (_dot(do, tl.trans(v)) - delta[:, None])
            dq = _add(ds.to(k.dtype), k, dq)
        _put(back, row, TOKENS, dq * SLOPE, 3 * DIM, WIDTH)
