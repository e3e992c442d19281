"""The kernels of `norm.py`: every tensor is read once and written once, and a row stays in registers.

A tile is ROWS rows, split into PIECES pieces of WIDTH columns, a power of two: 384 is 3×128, so that no thread idles,
and the rows of a piece lie within a warp, which sums them without shared memory. A program loops over every n-th tile,
with n the number of programs. Arithmetic is float32. The compiler removes what is None.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _append(pieces, piece):
    return pieces + (piece,)  # noqa: RUF005  # the form that Triton supports


@triton.jit
def _in_bounds(row, rows, PIECE: tl.constexpr, D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    inside = (row < rows)[:, None]
    if PIECES * WIDTH > D:
        inside = inside & (PIECE * WIDTH + tl.arange(0, WIDTH) < D)[None, :]
    return inside


@triton.jit
def _load(base, row, rows, D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    """Load the pieces of some rows, 0 outside."""
    offset = row.to(tl.int64)[:, None] * D + tl.arange(0, WIDTH)[None, :]
    pieces = ()
    for i in tl.static_range(PIECES):
        inside = _in_bounds(row, rows, i, D, PIECES, WIDTH)
        pieces = _append(pieces, tl.load(base + offset + i * WIDTH, mask=inside, other=0.0))
    return pieces


@triton.jit
def _store(base, row, rows, pieces, D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    offset = row.to(tl.int64)[:, None] * D + tl.arange(0, WIDTH)[None, :]
    for i in tl.static_range(PIECES):
        inside = _in_bounds(row, rows, i, D, PIECES, WIDTH)
        tl.store(base + offset + i * WIDTH, pieces[i].to(base.dtype.element_ty), mask=inside)


@triton.jit
def _load_columns(base, PIECE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Load one number for each column of a piece, 0 outside.

    Each row loads it, from the cache, so that every thread has those of its columns: a vector would go through shared
    memory.
    """
    column = PIECE * WIDTH + tl.arange(0, WIDTH)
    offset = tl.zeros((ROWS,), tl.int32)[:, None] + column[None, :]
    return tl.load(base + offset, mask=offset < D, other=0.0).to(tl.float32)


@triton.jit
def _load_row_values(base, row, rows):
    """Load one number for each row."""
    return tl.load(base + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, branch, factor, weight, bias, total, y, mean, rstd, rows,
    EPS: tl.constexpr, D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        values = _load(x, row, rows, D, PIECES, WIDTH)
        if branch is not None:
            branch_values = _load(branch, row, rows, D, PIECES, WIDTH)
            sums = ()
            for i in tl.static_range(PIECES):
                addend = branch_values[i].to(tl.float32)
                if factor is not None:
                    addend *= _load_row_values(factor, row, rows)
                # the norm is of the rounded sum, which is what backward has
                sums = _append(sums, (values[i].to(tl.float32) + addend).to(total.dtype.element_ty))
            values = sums
            _store(total, row, rows, values, D, PIECES, WIDTH)
        row_total = tl.zeros((ROWS, WIDTH), tl.float32)
        for i in tl.static_range(PIECES):
            row_total += values[i].to(tl.float32)
        m = tl.sum(row_total, 1) * (1 / D)
        squares = tl.zeros((ROWS, WIDTH), tl.float32)
        for i in tl.static_range(PIECES):
            deviation = values[i].to(tl.float32) - m[:, None]
            squares += tl.where(_in_bounds(row, rows, i, D, PIECES, WIDTH), deviation * deviation, 0.0)
        r = tl.rsqrt(tl.sum(squares, 1) * (1 / D) + EPS)
        out = ()
        for i in tl.static_range(PIECES):
            scaled = (values[i].to(tl.float32) - m[:, None]) * r[:, None]
            scaled = scaled * _load_columns(weight, i, D, WIDTH, ROWS) + _load_columns(bias, i, D, WIDTH, ROWS)
            out = _append(out, scaled)
        _store(y, row, rows, out, D, PIECES, WIDTH)
        if mean is not None:
            tl.store(mean + row, m, mask=row < rows)
            tl.store(rstd + row, r, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    dy, dtotal, total, mean, rstd, weight, factor, dx, dbranch, sums, rows,
    D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store dx, dbranch and, in `sums`, 2×programs×D, what each program adds to the gradients of weight and bias."""
    dw, db = (), ()
    for _ in tl.static_range(PIECES):
        dw = _append(dw, tl.zeros((ROWS, WIDTH), tl.float32))
        db = _append(db, tl.zeros((ROWS, WIDTH), tl.float32))
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        values = _load(total, row, rows, D, PIECES, WIDTH)
        dy_values = _load(dy, row, rows, D, PIECES, WIDTH)
        if dtotal is not None:
            dtotal_values = _load(dtotal, row, rows, D, PIECES, WIDTH)
        m, r = _load_row_values(mean, row, rows), _load_row_values(rstd, row, rows)
        projection = tl.zeros((ROWS, WIDTH), tl.float32)
        mean_grad = tl.zeros((ROWS, WIDTH), tl.float32)
        dw_next, db_next = (), ()
        for i in tl.static_range(PIECES):
            g = dy_values[i].to(tl.float32)
            scaled = (values[i].to(tl.float32) - m) * r
            dw_next = _append(dw_next, dw[i] + g * scaled)
            db_next = _append(db_next, db[i] + g)
            weighted = g * _load_columns(weight, i, D, WIDTH, ROWS)  # loaded for each tile, to save registers
            projection += weighted * scaled
            mean_grad += weighted
        dw, db = dw_next, db_next
        # the norm does not change with the scale and the mean of a row, so neither gets a gradient
        projected, constant = (tl.sum(projection, 1) * (1 / D))[:, None], (tl.sum(mean_grad, 1) * (1 / D))[:, None]
        dx_values = ()
        for i in tl.static_range(PIECES):
            scaled = (values[i].to(tl.float32) - m) * r
            dx_piece = (
                dy_values[i].to(tl.float32) * _load_columns(weight, i, D, WIDTH, ROWS) - constant - scaled * projected
            ) * r
            if dtotal is not None:
                dx_piece += dtotal_values[i].to(tl.float32)
            dx_values = _append(dx_values, dx_piece)
        _store(dx, row, rows, dx_values, D, PIECES, WIDTH)
        if dbranch is not None:
            if factor is not None:
                dbranch_values = ()
                for i in tl.static_range(PIECES):
                    dbranch_values = _append(dbranch_values, dx_values[i] * _load_row_values(factor, row, rows))
                dx_values = dbranch_values
            _store(dbranch, row, rows, dx_values, D, PIECES, WIDTH)
    base = sums + tl.program_id(0) * D
    for i in tl.static_range(PIECES):
        column = i * WIDTH + tl.arange(0, WIDTH)
        tl.store(base + column, tl.sum(dw[i], 0), mask=column < D)
        tl.store(base + tl.num_programs(0) * D + column, tl.sum(db[i], 0), mask=column < D)
