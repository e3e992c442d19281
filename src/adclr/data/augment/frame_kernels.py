"""Triton kernels that resize whole images of any sizes as Pillow does, computing only a frame of each.

Across first, rounded to bytes, then down, rounded again: Pillow's order, so that pixels equal Pillow's except for ties
(its weights have 22 bits, ours 24). The kernels of the views in `kernels.py` do not round in between and go down first,
which is faster; where results are compared with those of other programs, one level of 255 counts.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from adclr.data.augment.kernels import _cubic
from adclr.data.augment.resample import source_range
from adclr.data.packed import Packed
from adclr.system.devices import send

# An image has 13 numbers in the table: its offset, height and width; rows and columns it is resized to; top, left,
# height and width of the frame in them; the first of its rows that the frame needs, and how many; the offsets of its
# half-resized form and of its frame.
ENTRY = 13
ROWS, COLUMNS = 8, 128  # of a frame that a program computes at once
WARPS = 4
HALF = 2**29  # bytes of half-resized images held at once


@triton.jit
def _reach(target, length, size):
    """Return the first tap, the number of taps, the first position in the kernel and the step between taps.

    Of outputs `target` of `size` on an axis of `length`, in 64 bits: at pixel 50 000, float32 has steps of 1/256 pixel.
    """
    scale = length.to(tl.float64) / size.to(tl.float64)
    wide = tl.maximum(scale, 1.0)
    center = (target.to(tl.float64) + 0.5) * scale
    first = tl.maximum(tl.floor(center - 2.0 * wide + 0.5), 0.0)
    last = tl.minimum(tl.floor(center + 2.0 * wide + 0.5), length.to(tl.float64))
    position = (first - center + 0.5) / wide
    return first.to(tl.int32), (last - first).to(tl.int32), position.to(tl.float32), (1.0 / wide).to(tl.float32)


@triton.jit
def _to_byte(x):
    return tl.minimum(tl.maximum(tl.floor(x + 0.5), 0.0), 255.0).to(tl.uint8)


@triton.jit
def _across(data, table, half, channels, ENTRY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Resize the rows that the frame needs to its columns: half[start + (channel·used + row)·width + column]."""
    entry = table + tl.program_id(0) * ENTRY
    base, height, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    size, left, width = tl.load(entry + 4), tl.load(entry + 6), tl.load(entry + 8)
    top, used, start = tl.load(entry + 9), tl.load(entry + 10), tl.load(entry + 11)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if (tl.program_id(1) * ROWS < used) & (tl.program_id(2) * COLUMNS < width):
        inside = (row < used)[:, None] & (column < width)[None, :]
        first, taps, position, step = _reach(left + column, length, size)
        count = tl.max(tl.where(column < width, taps, 0), axis=0)
        total = tl.zeros((COLUMNS,), tl.float32)
        for tap in range(count):
            total += tl.where(tap < taps, _cubic(position + tap * step), 0.0)
        total = tl.where(total == 0.0, 1.0, total)  # outside of the frame
        start_of_row = (top + row) * length
        for channel in range(channels):
            read = data + base + channel * height * length
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            for tap in range(count):
                weight = tl.where(tap < taps, _cubic(position + tap * step), 0.0) / total
                source = tl.minimum(first + tap, (length - 1).to(tl.int32))
                pixel = tl.load(read + (start_of_row[:, None] + source[None, :]), mask=inside, other=0)
                sums += pixel.to(tl.float32) * weight[None, :]
            write = half + start + channel * used * width
            tl.store(write + (row[:, None] * width + column[None, :]), _to_byte(sums), mask=inside)


@triton.jit
def _down(half, table, frames, channels, ENTRY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Resize the columns of `half` to the rows of the frame: frames[start + (channel·height + row)·width + column]."""
    entry = table + tl.program_id(0) * ENTRY
    length, size, top = tl.load(entry + 1), tl.load(entry + 3), tl.load(entry + 5)
    height, width = tl.load(entry + 7), tl.load(entry + 8)
    begin, used, start, out = tl.load(entry + 9), tl.load(entry + 10), tl.load(entry + 11), tl.load(entry + 12)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if (tl.program_id(1) * ROWS < height) & (tl.program_id(2) * COLUMNS < width):
        inside = (row < height)[:, None] & (column < width)[None, :]
        first, taps, position, step = _reach(top + row, length, size)
        count = tl.max(tl.where(row < height, taps, 0), axis=0)
        total = tl.zeros((ROWS,), tl.float32)
        for tap in range(count):
            total += tl.where(tap < taps, _cubic(position + tap * step), 0.0)
        total = tl.where(total == 0.0, 1.0, total)
        for channel in range(channels):
            read = half + start + channel * used * width
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            for tap in range(count):
                weight = tl.where(tap < taps, _cubic(position + tap * step), 0.0) / total
                source = tl.minimum(first - begin + tap, used - 1) * width
                pixel = tl.load(read + (source[:, None] + column[None, :]), mask=inside, other=0)
                sums += pixel.to(tl.float32) * weight[:, None]
            write = frames + out + channel * height * width
            tl.store(write + (row[:, None] * width + column[None, :]), _to_byte(sums), mask=inside)


def resize(packed: Packed, frames: NDArray[np.int64], offsets: NDArray[np.int64], out: Tensor) -> None:
    """Write the frame of each packed image, C×height×width, to its offset in `out`, flat bytes on the same device.

    `frames` is n×6: rows and columns that the whole image is resized to, top, left, height and width of the frame.
    """
    channels = packed.num_channels
    table = np.empty((len(frames), ENTRY), np.int64)
    table[:, 0], table[:, 1:3], table[:, 3:9] = packed.offsets, packed.sizes, frames
    table[:, 9], table[:, 10] = source_range(packed.sizes[:, 0], frames[:, 0], frames[:, 2], frames[:, 4])
    table[:, 12] = offsets
    sizes = channels * table[:, 10] * table[:, 8]
    ends, first = np.cumsum(sizes), 0
    while first < len(table):
        last = max(first + 1, int(np.searchsorted(ends, ends[first] - sizes[first] + HALF, "right")))
        part = table[first:last]
        part[:, 11] = ends[first:last] - sizes[first:last] - (ends[first] - sizes[first])
        half = torch.empty(int(sizes[first:last].sum()), dtype=torch.uint8, device=out.device)
        entries, widest = send(part, out.device), triton.cdiv(int(part[:, 8].max()), COLUMNS)
        shape = {"ENTRY": ENTRY, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
        rows = triton.cdiv(int(part[:, 10].max()), ROWS)
        _across[(len(part), rows, widest)](packed.bytes, entries, half, channels, **shape)
        rows = triton.cdiv(int(part[:, 7].max()), ROWS)
        _down[(len(part), rows, widest)](half, entries, out, channels, **shape)
        first = last
