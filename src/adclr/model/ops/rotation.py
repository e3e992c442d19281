"""Rotary positions: queries and keys of the output of the qkv layer are turned before attention, values are not.

`plain` is the reference in PyTorch and works everywhere; on NVIDIA GPUs `fused` runs the kernel of
`rotation_kernels.py`, as one operation for `torch.compile`. Its gradient is the rotation the other way, so that nothing
but the table is stored for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adclr.model.ops.attention import Group
from adclr.system import triton_available

DTYPES = (torch.bfloat16, torch.float16)


class Rotation(NamedTuple):
    """Cosines and sines of the angles of the tokens of some groups of sequences.

    The table is 2×P×(W/2), with W the width of a head: number i of a head and number i + W/2 are turned by angle i. The
    tables of the groups follow each other; each is repeated for the rows of its group.
    """

    table: Tensor
    periods: tuple[int, ...]  # rows of the table that are each group's, P together


def rotate(qkv: Tensor, rotation: Rotation, groups: Sequence[Group], num_heads: int) -> Tensor:
    """M×3D -> M×3D with queries and keys turned, in the layout of timm's qkv layer."""
    run = fused if _fits(qkv) else plain
    return run(qkv, rotation, groups, num_heads)


def _fits(qkv: Tensor) -> bool:
    """Return whether the kernel supports this tensor on this device."""
    return triton_available.possible and qkv.device.type == "cuda" and qkv.dtype in DTYPES


def plain(qkv: Tensor, rotation: Rotation, groups: Sequence[Group], num_heads: int) -> Tensor:
    """Run PyTorch's operations, in float32 or wider."""
    half, parts = qkv.shape[1] // 6 // num_heads, []
    rows = [group.sequences * group.tokens for group in groups]
    dtype = torch.promote_types(qkv.dtype, rotation.table.dtype)
    tables = torch.split(rotation.table, list(rotation.periods), dim=1)
    for part, table in zip(torch.split(qkv, rows), tables, strict=True):
        cos, sin = table[:, :, None, None]  # P×1×1×(W/2)
        values = part.view(-1, table.shape[1], 3, num_heads, 2 * half)
        first, second = torch.split(values[:, :, :2].to(dtype), half, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qkv.dtype)
        parts.append(torch.cat([turned, values[:, :, 2:]], dim=2).view(part.shape))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def fused(qkv: Tensor, rotation: Rotation, groups: Sequence[Group], num_heads: int) -> Tensor:
    """Run the kernel, without a check of `_fits`."""
    rows = [group.sequences * group.tokens for group in groups]
    table, width = rotation.table, qkv.shape[1] // 3 // num_heads
    if sum(rows) != qkv.shape[0] or any(count % period for count, period in zip(rows, rotation.periods, strict=True)):
        raise ValueError(f"{qkv.shape[0]} tokens are not {rows} tokens with tables of {rotation.periods}")
    if table.shape != (2, sum(rotation.periods), width // 2):
        raise ValueError(f"a table of {tuple(table.shape)} is not for heads {width} wide")
    out: Tensor = _rotate(qkv, table, rows, list(rotation.periods), num_heads, False)
    return out


# -- the operation --


@torch.library.custom_op("adclr::rotate", mutates_args=())
def _rotate(qkv: Tensor, table: Tensor, rows: list[int], periods: list[int], num_heads: int, inverse: bool) -> Tensor:
    with torch.cuda.device_of(qkv):  # type: ignore[no-untyped-call]
        return _launch(qkv.contiguous(), table, rows, periods, num_heads, inverse)


@_rotate.register_fake
def _(qkv: Tensor, *_: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    _, table, *ctx.others, ctx.inverse = inputs
    ctx.save_for_backward(table)


def _autograd_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (table,) = ctx.saved_tensors
    return _rotate(grad, table, *ctx.others, not ctx.inverse), None, None, None, None, None


_rotate.register_autograd(_autograd_backward, setup_context=_setup_context)


# -- launches --

TILE = 2048  # pairs of numbers of a program: 8 of a thread are 16 bytes from each half
WARPS = 8

# The kernel is imported where it is launched, since Triton may be missing.


def _launch(
    qkv: Tensor, table: Tensor, rows: Sequence[int], periods: Sequence[int], num_heads: int, inverse: bool
) -> Tensor:
    """Launch the kernel for each group; return a new tensor."""
    from adclr.model.ops import rotation_kernels as kernels

    out = torch.empty_like(qkv)
    pairs = qkv.shape[1] // 6
    columns = 1 << (pairs - 1).bit_length()
    tile = max(1, TILE // columns)
    row = entry = 0
    for count, period in zip(rows, periods, strict=True):
        if count:
            kernels._rotate[(3 * -(-count // tile),)](
                qkv[row : row + count],
                out[row : row + count],
                table[0, entry : entry + period],
                table[1, entry : entry + period],
                count,
                PERIOD=period,
                PAIRS=pairs,
                HALF=pairs // num_heads,
                INVERSE=inverse,
                ROWS=tile,
                COLUMNS=columns,
                num_warps=WARPS,
            )
        row, entry = row + count, entry + period
    return out
