"""The kernels of `norm.py`: every tensor is read once and written once, and a row never leaves the registers.

A tile is ROWS rows, cut into PIECES pieces of WIDTH columns, a power of two: 384 is 3×128, so that no thread idles, and
the rows of a piece lie within a warp, which adds them up without shared memory. A program goes from tile to tile in
steps of the number of programs. Arithmetic is float32. What is None is left out when a kernel is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _and(pieces, piece):
    return pieces + (piece,)  # noqa: RUF005  # what Triton knows of tuples


@triton.jit
def _within(row, rows, PIECE: tl.constexpr, D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    inside = (row < rows)[:, None]
    if PIECES * WIDTH > D:
        inside = inside & (PIECE * WIDTH + tl.arange(0, WIDTH) < D)[None, :]
    return inside


@triton.jit
def _tile(at, row, rows, D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    """The pieces of some rows, 0 outside."""
    place = row.to(tl.int64)[:, None] * D + tl.arange(0, WIDTH)[None, :]
    pieces = ()
    for i in tl.static_range(PIECES):
        inside = _within(row, rows, i, D, PIECES, WIDTH)
        pieces = _and(pieces, tl.load(at + place + i * WIDTH, mask=inside, other=0.0))
    return pieces


@triton.jit
def _put(at, row, rows, pieces, D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    place = row.to(tl.int64)[:, None] * D + tl.arange(0, WIDTH)[None, :]
    for i in tl.static_range(PIECES):
        inside = _within(row, rows, i, D, PIECES, WIDTH)
        tl.store(at + place + i * WIDTH, pieces[i].to(at.dtype.element_ty), mask=inside)


@triton.jit
def _columns(at, PIECE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """One number for each column of a piece, 0 outside. Each row loads it, from the cache, so that every thread gets
    those of its own columns: a vector would go through shared memory."""
    column = PIECE * WIDTH + tl.arange(0, WIDTH)
    place = tl.zeros((ROWS,), tl.int32)[:, None] + column[None, :]
    return tl.load(at + place, mask=place < D, other=0.0).to(tl.float32)


@triton.jit
def _numbers(at, row, rows):
    """One number for each row."""
    return tl.load(at + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, branch, factor, weight, bias, total, y, mean, rstd, rows,
    EPS: tl.constexpr, D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        values = _tile(x, row, rows, D, PIECES, WIDTH)
        if branch is not None:
            added = _tile(branch, row, rows, D, PIECES, WIDTH)
            sums = ()
            for i in tl.static_range(PIECES):
                more = added[i].to(tl.float32)
                if factor is not None:
                    more *= _numbers(factor, row, rows)
                # rounded before it is looked at: backward has nothing else
                sums = _and(sums, (values[i].to(tl.float32) + more).to(total.dtype.element_ty))
            values = sums
            _put(total, row, rows, values, D, PIECES, WIDTH)
        all_of_it = tl.zeros((ROWS, WIDTH), tl.float32)
        for i in tl.static_range(PIECES):
            all_of_it += values[i].to(tl.float32)
        m = tl.sum(all_of_it, 1) * (1 / D)
        squares = tl.zeros((ROWS, WIDTH), tl.float32)
        for i in tl.static_range(PIECES):
            away = values[i].to(tl.float32) - m[:, None]
            squares += tl.where(_within(row, rows, i, D, PIECES, WIDTH), away * away, 0.0)
        r = tl.rsqrt(tl.sum(squares, 1) * (1 / D) + EPS)
        out = ()
        for i in tl.static_range(PIECES):
            scaled = (values[i].to(tl.float32) - m[:, None]) * r[:, None]
            scaled = scaled * _columns(weight, i, D, WIDTH, ROWS) + _columns(bias, i, D, WIDTH, ROWS)
            out = _and(out, scaled)
        _put(y, row, rows, out, D, PIECES, WIDTH)
        if mean is not None:
            tl.store(mean + row, m, mask=row < rows)
            tl.store(rstd + row, r, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    dy, dtotal, total, mean, rstd, weight, factor, dx, dbranch, sums, rows,
    D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`sums`, 2×programs×D: of each program, what its rows add to the gradients of weight and bias."""
    dw, db = (), ()
    for _ in tl.static_range(PIECES):
        dw = _and(dw, tl.zeros((ROWS, WIDTH), tl.float32))
        db = _and(db, tl.zeros((ROWS, WIDTH), tl.float32))
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        values = _tile(total, row, rows, D, PIECES, WIDTH)
        given = _tile(dy, row, rows, D, PIECES, WIDTH)
        if dtotal is not None:
            others = _tile(dtotal, row, rows, D, PIECES, WIDTH)
        m, r = _numbers(mean, row, rows), _numbers(rstd, row, rows)
        along = tl.zeros((ROWS, WIDTH), tl.float32)
        level = tl.zeros((ROWS, WIDTH), tl.float32)
        dw_next, db_next = (), ()
        for i in tl.static_range(PIECES):
            g = given[i].to(tl.float32)
            scaled = (values[i].to(tl.float32) - m) * r
            dw_next = _and(dw_next, dw[i] + g * scaled)
            db_next = _and(db_next, db[i] + g)
            weighted = g * _columns(weight, i, D, WIDTH, ROWS)  # loaded for each tile: held, it would take registers
            along += weighted * scaled
            level += weighted
        dw, db = dw_next, db_next
        # what of the gradient goes along the row itself, or is the same for all columns, changes nothing
        lost, common = (tl.sum(along, 1) * (1 / D))[:, None], (tl.sum(level, 1) * (1 / D))[:, None]
        back = ()
        for i in tl.static_range(PIECES):
            scaled = (values[i].to(tl.float32) - m) * r
            part = (given[i].to(tl.float32) * _columns(weight, i, D, WIDTH, ROWS) - common - scaled * lost) * r
            if dtotal is not None:
                part += others[i].to(tl.float32)
            back = _and(back, part)
        _put(dx, row, rows, back, D, PIECES, WIDTH)
        if dbranch is not None:
            if factor is not None:
                apart = ()
                for i in tl.static_range(PIECES):
                    apart = _and(apart, back[i] * _numbers(factor, row, rows))
                back = apart
            _put(dbranch, row, rows, back, D, PIECES, WIDTH)
    at = sums + tl.program_id(0) * D
    for i in tl.static_range(PIECES):
        column = i * WIDTH + tl.arange(0, WIDTH)
        tl.store(at + column, tl.sum(dw[i], 0), mask=column < D)
        tl.store(at + tl.num_programs(0) * D + column, tl.sum(db[i], 0), mask=column < D)
