"""The views of `augment.render` in a few Triton kernels, for NVIDIA GPUs; the plain operations are their oracle.

Five launches for each kind of crop: resize along rows and along columns straight from the packed images, colours, blur
(two), and solarise with normalise. A program works on one crop, so a view cannot depend on its neighbours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from adclr import views as planning
from adclr.augment.photometric import BLUR_RADIUS
from adclr.augment.transfer import send

# A crop is 8 numbers of the table: offset, height, width, top, left, crop height, crop width, flip.
ROWS, PIXELS = 8, 1024  # rows and pixels a program works on at once


@triton.jit
def _cubic(x):
    """Keys' kernel with a = -0.5."""
    x = tl.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))


@triton.jit
def _reach(target, length, size):
    """Of outputs `target` of `size` on an axis of `length`: their centers, the kernel's width, first and last tap."""
    length = length.to(tl.float32)
    scale = length / size
    wide = tl.maximum(scale, 1.0)
    center = (target.to(tl.float32) + 0.5) * scale
    first = tl.maximum(tl.floor(center - 2.0 * wide + 0.5), 0.0)
    last = tl.minimum(tl.floor(center + 2.0 * wide + 0.5), length)
    return center, wide, first, last


@triton.jit
def _tap(place, center, wide, last, length):
    """The weight of a place, 0 past the last, and the pixel that stands for it."""
    weight = tl.where(place < last, _cubic((place - center + 0.5) / wide), 0.0)
    return weight, tl.minimum(place, length.to(tl.float32) - 1.0).to(tl.int64)


@triton.jit
def _rows(data, table, starts, half, size, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Each row of each crop to `size` columns, flipped if need be: half[start + channel·height + row, column]."""
    n = tl.program_id(0)
    offset, height, width = tl.load(table + n * 8), tl.load(table + n * 8 + 1), tl.load(table + n * 8 + 2)
    top, left = tl.load(table + n * 8 + 3), tl.load(table + n * 8 + 4)
    crop_height, crop_width = tl.load(table + n * 8 + 5), tl.load(table + n * 8 + 6)
    flip, start = tl.load(table + n * 8 + 7), tl.load(starts + n)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < crop_height)[:, None] & (column < size)[None, :]
    center, wide, first, last = _reach(tl.where(flip > 0, size - 1 - column, column), crop_width, size)
    count = tl.ceil(4.0 * wide).to(tl.int32) + 1
    base = offset + (top + row)[:, None] * width + left
    if tl.program_id(1) * ROWS < crop_height:
        for channel in range(channels):
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            total = tl.zeros((COLUMNS,), tl.float32)
            for tap in range(count):
                weight, source = _tap(first + tap, center, wide, last, crop_width)
                total += weight
                pixel = tl.load(data + base + channel * height * width + source[None, :], mask=inside, other=0)
                sums += pixel.to(tl.float32) * weight[None, :]
            out = (start + channel * crop_height + row)[:, None] * size + column[None, :]
            tl.store(half + out, sums / total[None, :], mask=inside)


@triton.jit
def _columns(half, table, starts, crops, size, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows of `half` to `size` rows: crops[crop, channel, row, column] in [0, 1]."""
    n = tl.program_id(0)
    crop_height, start = tl.load(table + n * 8 + 5), tl.load(starts + n)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < size)[:, None] & (column < size)[None, :]
    center, wide, first, last = _reach(row, crop_height, size)
    count = tl.ceil(4.0 * wide).to(tl.int32) + 1
    for channel in range(channels):
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        for tap in range(count):
            weight, source = _tap(first + tap, center, wide, last, crop_height)
            total += weight
            address = (start + channel * crop_height + source)[:, None] * size + column[None, :]
            sums += tl.load(half + address, mask=inside, other=0.0) * weight[:, None]
        value = tl.minimum(tl.maximum(sums / total[:, None], 0.0), 255.0) / 255.0
        out = ((n.to(tl.int64) * channels + channel) * size + row)[:, None] * size + column[None, :]
        tl.store(crops + out, value, mask=inside)


@triton.jit
def _unit(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _luma(r, g, b):
    """ITU-R 601."""
    return 0.2989 * r + 0.587 * g + 0.114 * b


@triton.jit
def _ramp(turned, start, value, chroma):
    """One channel of a hue in sixths of a turn; % of Triton keeps the sign, so the remainder is written out."""
    k = turned + start
    k = k - 6.0 * tl.floor(k / 6.0)
    return value - chroma * _unit(tl.minimum(k, 4.0 - k))


@triton.jit
def _jitter(r, g, b, step, factor, mean):
    """One step of the jitter: 0 brightness, 1 contrast (against `mean`), 2 saturation, 3 hue."""
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
def _colours(crops, on, factors, order, grey, pixels, PIXELS: tl.constexpr):
    """Jitter in its order, then grey, in place; contrast needs the mean luma, so what precedes it is done twice."""
    n = tl.program_id(0).to(tl.int64)
    jitter, to_grey = tl.load(on + n), tl.load(grey + n)
    base = crops + n * 3 * pixels
    mean = 0.0
    if jitter > 0:
        total = tl.zeros((PIXELS,), tl.float32)
        for begin in range(0, pixels, PIXELS):
            at = begin + tl.arange(0, PIXELS)
            inside = at < pixels
            r = tl.load(base + at, mask=inside, other=0.0)
            g = tl.load(base + pixels + at, mask=inside, other=0.0)
            b = tl.load(base + 2 * pixels + at, mask=inside, other=0.0)
            before = 1  # until contrast comes
            for place in range(4):
                step = tl.load(order + n * 4 + place)
                before = tl.where(step == 1, 0, before)
                if before > 0:
                    r, g, b = _jitter(r, g, b, step, tl.load(factors + n * 4 + step), 0.0)
            total += tl.where(inside, _luma(r, g, b), 0.0)
        mean = tl.sum(total, axis=0) / pixels
    if (jitter > 0) | (to_grey > 0):
        for begin in range(0, pixels, PIXELS):
            at = begin + tl.arange(0, PIXELS)
            inside = at < pixels
            r = tl.load(base + at, mask=inside, other=0.0)
            g = tl.load(base + pixels + at, mask=inside, other=0.0)
            b = tl.load(base + 2 * pixels + at, mask=inside, other=0.0)
            if jitter > 0:
                for place in range(4):
                    step = tl.load(order + n * 4 + place)
                    r, g, b = _jitter(r, g, b, step, tl.load(factors + n * 4 + step), mean)
            if to_grey > 0:
                luma = _luma(r, g, b)
                r, g, b = luma, luma, luma
            tl.store(base + at, r, mask=inside)
            tl.store(base + pixels + at, g, mask=inside)
            tl.store(base + 2 * pixels + at, b, mask=inside)


@triton.jit
def _blur(source, target, source_index, target_index, sigmas, size, channels, stride, radius, PIXELS: tl.constexpr):
    """A Gaussian along one axis (its `stride` is 1 or `size`), reflected at the border."""
    k = tl.program_id(0)
    channel = tl.program_id(1)
    at = tl.program_id(2) * PIXELS + tl.arange(0, PIXELS)
    inside = at < size * size
    sigma = tl.load(sigmas + k)
    read = source + (tl.load(source_index + k) * channels + channel) * size * size
    place = (at // stride) % size
    line = at - place * stride
    sums = tl.zeros((PIXELS,), tl.float32)
    total = 0.0
    for tap in range(2 * radius + 1):
        distance = (tap - radius).to(tl.float32) / sigma
        weight = tl.exp(-0.5 * distance * distance)
        total += weight
        moved = tl.abs(place + tap - radius)
        moved = tl.where(moved >= size, 2 * size - 2 - moved, moved)
        sums += tl.load(read + line + moved * stride, mask=inside, other=0.0) * weight
    write = target + (tl.load(target_index + k) * channels + channel) * size * size
    tl.store(write + at, sums / total, mask=inside)


@triton.jit
def _finish(crops, solar, center, scale, pixels, channels, PIXELS: tl.constexpr):
    """Solarise where it is drawn, and normalise, in place."""
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    inside = at < channels * pixels
    x = tl.load(crops + n * channels * pixels + at, mask=inside, other=0.0)
    x = tl.where((tl.load(solar + n) > 0) & (x >= 128.0 / 255.0), 1.0 - x, x)
    channel = at // pixels
    x = (x - tl.load(center + channel, mask=inside, other=0.0)) / tl.load(scale + channel, mask=inside, other=1.0)
    tl.store(crops + n * channels * pixels + at, x, mask=inside)


def render_crops(packed: Any, crops: planning.Crops, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """V×B×C×S×S, as the plain `augment._render` makes them."""
    device, channels, size = packed.bytes.device, packed.num_channels, crops.size
    batch, count = crops.flip.shape
    by_view = np.arange(batch * count).reshape(batch, count).T.reshape(-1)  # view-major, as the method wants them
    image = by_view // count
    number = len(by_view)

    def flat(array: NDArray[Any], kind: type) -> NDArray[Any]:
        return array.reshape(batch * count, *array.shape[2:])[by_view].astype(kind)

    boxes = flat(crops.boxes, np.int64)
    table = np.concatenate(
        [packed.offsets[image][:, None], packed.sizes[image], boxes, flat(crops.flip, np.int64)[:, None]], axis=1
    )
    heights = boxes[:, 2] * channels
    starts = np.cumsum(heights) - heights  # rows of the half-resized crops before each
    half = torch.empty(int(heights.sum()), size, device=device)
    out = torch.empty(number, channels, size, size, device=device)
    columns = min(64, triton.next_power_of_2(size))
    wide, places = send(table, device), send(starts, device)
    blocks = triton.cdiv(size, columns)
    tallest = int(boxes[:, 2].max())
    _rows[(number, triton.cdiv(tallest, ROWS), blocks)](
        packed.bytes, wide, places, half, size, channels, ROWS=ROWS, COLUMNS=columns
    )
    _columns[(number, triton.cdiv(size, ROWS), blocks)](
        half, wide, places, out, size, channels, ROWS=ROWS, COLUMNS=columns
    )
    pixels = size * size
    jitter, grey = flat(crops.jitter, np.int32), flat(crops.grey, np.int32)
    if channels == 3 and (jitter | grey).any():
        factors, order = flat(crops.factors, np.float32), flat(crops.order, np.int32)
        numbers = [send(array, device) for array in (jitter, factors, order, grey)]
        _colours[(number,)](out, *numbers, pixels, PIXELS=PIXELS)
    sigma = flat(crops.sigma, np.float32)
    blurred = np.flatnonzero(sigma > 0)
    if len(blurred):
        temporary = torch.empty(len(blurred), channels, size, size, device=device)
        here, own = send(blurred, device), send(np.arange(len(blurred)), device)
        widths, radius = send(sigma[blurred], device), min(BLUR_RADIUS, size - 1)
        grid = (len(blurred), channels, triton.cdiv(pixels, PIXELS))
        _blur[grid](out, temporary, here, own, widths, size, channels, 1, radius, PIXELS=PIXELS)
        _blur[grid](temporary, out, own, here, widths, size, channels, size, radius, PIXELS=PIXELS)
    solar = send(flat(crops.solarise, np.int32), device)
    center, scale = (send(np.array(numbers, np.float32), device) for numbers in (mean, std))
    _finish[(number, triton.cdiv(channels * pixels, PIXELS))](
        out, solar, center, scale, pixels, channels, PIXELS=PIXELS
    )
    return out.view(count, batch, channels, size, size)
