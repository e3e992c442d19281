"""Triton kernels that render the views of `augment.render` on NVIDIA GPUs; the plain operations are their reference.

Five launches for each kind of crop: the weights of the resizing, resize down the columns straight from the packed
images and then across the rows, colors, and blur with solarize and normalize. A program works on one crop, so a view
cannot depend on its neighbors. Resizing and blur are products with a band of weights, which run on tensor cores; a
source pixel is then read once or twice, not once for each output that it contributes to. Bytes are exact in float16;
weights and intermediate pixels, centered at 0, are rounded to it, which changes a pixel by up to 0.1 of 255 each time.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A crop has 7 numbers in the table: the offset of its first pixel, bytes of a row and of a channel of its image, its
# height and width, whether it is flipped, and the offset of its half-resized form.
ENTRY = 7
# 7 choices: whether colors are jittered, made gray, solarized; the order of the jitter. 5 factors: its four, sigma.
CHOICES, FACTORS = 7, 5
# In the resizing: outputs, columns and source pixels of a program's matrix product; in the others: pixels at once.
TILE, COLUMNS, DEPTH, PIXELS = 32, 128, 32, 1024
WARPS, STAGES = 4, 1  # of the resizing
HALF = 2**27  # numbers of half-resized crops and weights held at once (256 MiB)


@triton.jit
def _cubic(x):
    """Return Keys' kernel with a = -0.5."""
    x = tl.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))


@triton.jit
def _reach(target, length, size):
    """Return centers, kernel width, first and last tap of outputs `target` of `size` on an axis of `length`."""
    length = length.to(tl.float32)
    scale = length / size
    wide = tl.maximum(scale, 1.0)
    center = (target.to(tl.float32) + 0.5) * scale
    first = tl.maximum(tl.floor(center - 2.0 * wide + 0.5), 0.0)
    last = tl.minimum(tl.floor(center + 2.0 * wide + 0.5), length)
    return center, wide, first, last


@triton.jit
def _bands(table, bands, sums, size, blocks, most, ENTRY: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr):
    """Compute the float16 weights of `OUTPUTS` outputs for the sources from the first that they reach on.

    bands[crop, axis, block, output, source - first], axis 0 down and 1 across, 0 outside an output's reach;
    sums[crop, axis, block, output] is what they add up to as rounded.
    """
    n, axis, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = table + n * ENTRY
    length = tl.load(entry + 3 + axis).to(tl.int32)
    flip = tl.load(entry + 5).to(tl.int32) * axis
    output = tl.arange(0, OUTPUTS)
    center, wide, first, last = _outputs(block * OUTPUTS + output, length, size, flip)
    begin, end = tl.min(first, axis=0), tl.max(last, axis=0)
    row = ((n.to(tl.int64) * 2 + axis) * blocks + block) * OUTPUTS + output
    total = tl.zeros((OUTPUTS,), tl.float32)
    count = (end - begin).to(tl.int32)
    for offset in range(0, count, DEPTH):
        source = offset + tl.arange(0, DEPTH)
        position = begin + source.to(tl.float32)[None, :]
        weight = _cubic((position - center[:, None] + 0.5) / wide)
        weight = tl.where((position >= first[:, None]) & (position < last[:, None]), weight, 0.0).to(tl.float16)
        total += tl.sum(weight.to(tl.float32), axis=1)
        tl.store(bands + (row[:, None] * most + source[None, :]), weight)
    tl.store(sums + row, total)


@triton.jit
def _outputs(position, length, size, flip):
    """Return `_reach` of outputs, mirrored if `flip`; outputs past the end count as the last."""
    position = tl.minimum(position, size - 1)
    return _reach(tl.where(flip > 0, size - 1 - position, position), length, size)


@triton.jit
def _down(
    data, table, bands, totals, half, size, channels, blocks, most,
    ENTRY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Resize each column of each crop to `size` rows: half[start + (channel·size + row)·width + column], less 128."""
    n, block = tl.program_id(0), tl.program_id(1)
    entry = table + n * ENTRY
    base, stride, plane = tl.load(entry), tl.load(entry + 1).to(tl.int32), tl.load(entry + 2)
    height, width = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
    start = tl.load(entry + 6)
    output = tl.arange(0, ROWS)
    row = block * ROWS + output
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(2) * COLUMNS < width:
        _, _, first, last = _outputs(row, height, size, 0)
        begin, end = tl.min(first, axis=0).to(tl.int32), tl.max(last, axis=0).to(tl.int32)
        band_row = (n.to(tl.int64) * 2 * blocks + block) * ROWS
        band = bands + band_row * most
        total = tl.load(totals + band_row + output)
        for channel in range(channels):
            read = data + base + channel * plane + begin * stride
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            for offset in range(0, end - begin, DEPTH):
                source = offset + tl.arange(0, DEPTH)
                weight = tl.load(band + (output[:, None] * most + source[None, :]))
                inside = (source < height - begin)[:, None] & (column < width)[None, :]
                pixel = tl.load(read + (source[:, None] * stride + column[None, :]), mask=inside, other=0)
                sums = tl.dot(weight, pixel.to(tl.float16), sums)
            write = half + start + channel * size * width
            value = (sums / total[:, None] - 128.0).to(tl.float16)
            inside = (row < size)[:, None] & (column < width)[None, :]
            tl.store(write + (row[:, None] * width + column[None, :]), value, mask=inside)


@triton.jit
def _across(
    half, table, bands, totals, crops, size, channels, blocks, most,
    ENTRY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Resize the rows of `half` to `size` columns, perhaps flipped: crops[crop, channel, row, column] - 0.5, of 1."""
    n, block = tl.program_id(0), tl.program_id(2)
    entry = table + n * ENTRY
    width, flip = tl.load(entry + 4).to(tl.int32), tl.load(entry + 5).to(tl.int32)
    start = tl.load(entry + 6)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.arange(0, COLUMNS)
    column = block * COLUMNS + output
    _, _, first, last = _outputs(column, width, size, flip)
    begin, end = tl.min(first, axis=0).to(tl.int32), tl.max(last, axis=0).to(tl.int32)
    band_row = ((n.to(tl.int64) * 2 + 1) * blocks + block) * COLUMNS
    band = bands + band_row * most
    total = tl.load(totals + band_row + output)
    for channel in range(channels):
        read = half + start + channel * size * width + begin
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for offset in range(0, end - begin, DEPTH):
            source = offset + tl.arange(0, DEPTH)
            weight = tl.load(band + (output[None, :] * most + source[:, None]))
            inside = (row < size)[:, None] & (source < width - begin)[None, :]
            value = tl.load(read + (row[:, None] * width + source[None, :]), mask=inside, other=0.0)
            sums = tl.dot(value, weight, sums)
        value = sums / total[None, :] + 128.0
        value = tl.minimum(tl.maximum(value, 0.0), 255.0) / 255.0 - 0.5
        write = crops + (n.to(tl.int64) * channels + channel) * size * size
        inside = (row < size)[:, None] & (column < size)[None, :]
        tl.store(write + (row[:, None] * size + column[None, :]), value, mask=inside)


@triton.jit
def _unit(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _luma(r, g, b):
    """ITU-R 601."""
    return 0.2989 * r + 0.587 * g + 0.114 * b


@triton.jit
def _ramp(turned, start, value, chroma):
    """Return one channel of a hue in sixths of a turn; Triton's % has the sign of its operand, so it is not used."""
    k = turned + start
    k = k - 6.0 * tl.floor(k / 6.0)
    return value - chroma * _unit(tl.minimum(k, 4.0 - k))


@triton.jit
def _jitter(r, g, b, step, factor, mean):
    """Apply one step of the jitter: 0 brightness, 1 contrast (against `mean`), 2 saturation, 3 hue."""
    if step == 0:
        r, g, b = _unit(r * factor), _unit(g * factor), _unit(b * factor)
    if step == 1:
        rest = mean * (1.0 - factor)
        r, g, b = _unit(r * factor + rest), _unit(g * factor + rest), _unit(b * factor + rest)
    if step == 2:
        rest = _luma(r, g, b) * (1.0 - factor)
        r, g, b = _unit(r * factor + rest), _unit(g * factor + rest), _unit(b * factor + rest)
    if step == 3:
        value = tl.maximum(r, tl.maximum(g, b))
        chroma = value - tl.minimum(r, tl.minimum(g, b))
        safe = tl.where(chroma > 0.0, chroma, 1.0)
        sixth = tl.where(value == r, (g - b) / safe, tl.where(value == g, 2.0 + (b - r) / safe, 4.0 + (r - g) / safe))
        turned = sixth + 6.0 * factor
        r = _ramp(turned, 5.0, value, chroma)
        g = _ramp(turned, 3.0, value, chroma)
        b = _ramp(turned, 1.0, value, chroma)
    return r, g, b


@triton.jit
def _load(base, index, pixels, inside):
    red = tl.load(base + index, mask=inside, other=0.0).to(tl.float32) + 0.5
    green = tl.load(base + pixels + index, mask=inside, other=0.0).to(tl.float32) + 0.5
    return red, green, tl.load(base + 2 * pixels + index, mask=inside, other=0.0).to(tl.float32) + 0.5


@triton.jit
def _colors(crops, choices, factors, pixels, CHOICES: tl.constexpr, FACTORS: tl.constexpr, PIXELS: tl.constexpr):
    """Apply jitter in its order, then gray, in place; contrast needs the mean luma, so what precedes it runs twice."""
    n = tl.program_id(0).to(tl.int64)
    jitter, to_gray = tl.load(choices + n * CHOICES), tl.load(choices + n * CHOICES + 1)
    order, factors = choices + n * CHOICES + 3, factors + n * FACTORS
    base = crops + n * 3 * pixels
    mean = 0.0
    if jitter > 0:
        total = tl.zeros((PIXELS,), tl.float32)
        for begin in range(0, pixels, PIXELS):
            index = begin + tl.arange(0, PIXELS)
            inside = index < pixels
            r, g, b = _load(base, index, pixels, inside)
            before = 1  # until contrast
            for position in range(4):
                step = tl.load(order + position)
                before = tl.where(step == 1, 0, before)
                if before > 0:
                    r, g, b = _jitter(r, g, b, step, tl.load(factors + step), 0.0)
            total += tl.where(inside, _luma(r, g, b), 0.0)
        mean = tl.sum(total, axis=0) / pixels
    if (jitter > 0) | (to_gray > 0):
        for begin in range(0, pixels, PIXELS):
            index = begin + tl.arange(0, PIXELS)
            inside = index < pixels
            r, g, b = _load(base, index, pixels, inside)
            if jitter > 0:
                for position in range(4):
                    step = tl.load(order + position)
                    r, g, b = _jitter(r, g, b, step, tl.load(factors + step), mean)
            if to_gray > 0:
                luma = _luma(r, g, b)
                r, g, b = luma, luma, luma
            tl.store(base + index, r - 0.5, mask=inside)
            tl.store(base + pixels + index, g - 0.5, mask=inside)
            tl.store(base + 2 * pixels + index, b - 0.5, mask=inside)


@triton.jit
def _finish(
    crops, views, choices, factors, center, scale, size, channels, radius,
    CHOICES: tl.constexpr, FACTORS: tl.constexpr, TILE: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Blur (reflected at the border) and solarize where drawn, and normalize: a tile of a channel."""
    n, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.cdiv(size, TILE)
    channel, top, left = tile // (tiles * tiles), tile // tiles % tiles * TILE, tile % tiles * TILE
    plane = (n * channels + channel) * size * size
    row, column = top + tl.arange(0, TILE)[:, None], left + tl.arange(0, TILE)[None, :]
    inside = (row < size) & (column < size)
    sigma = tl.load(factors + n * FACTORS + 4)
    if sigma > 0:
        source = tl.arange(0, REACH)
        distance = source[None, :] - radius - tl.arange(0, TILE)[:, None]
        away = distance.to(tl.float32) / sigma
        weight = tl.where(tl.abs(distance) <= radius, tl.exp(-0.5 * away * away), 0.0).to(tl.float16)
        total = tl.max(tl.sum(weight.to(tl.float32), axis=1), axis=0)  # the same for each output
        reached = source < TILE + 2 * radius
        down, across = _reflect(top - radius + source, size), _reflect(left - radius + source, size)
        pixel = tl.load(
            crops + plane + (down[:, None] * size + across[None, :]),
            mask=reached[:, None] & reached[None, :],
            other=0.0,
        )
        half = tl.dot(weight, pixel) / total
        x = tl.dot(half.to(tl.float16), tl.trans(weight)) / total
    else:
        x = tl.load(crops + plane + (row * size + column), mask=inside, other=0.0).to(tl.float32)
    x += 0.5
    x = tl.where((tl.load(choices + n * CHOICES + 2) > 0) & (x >= 128.0 / 255.0), 1.0 - x, x)
    x = (x - tl.load(center + channel)) / tl.load(scale + channel)
    tl.store(views + plane + (row * size + column), x, mask=inside)


@triton.jit
def _reflect(position, size):
    """Reflect positions that are at most the image's length outside; others become some position inside."""
    position = tl.abs(position)
    return tl.maximum(tl.where(position >= size, 2 * size - 2 - position, position), 0)
