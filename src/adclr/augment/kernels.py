"""The views of `augment.render` in a few Triton kernels, for NVIDIA GPUs; the plain operations are their oracle.

Seven launches for each kind of crop: the weights of the resizing, resize down the columns straight from the packed
images and then across the rows, colours, blur (two), and solarise with normalise. Down comes first because its reads
lie side by side, so that the larger half of the work is the cheap one. A program works on one crop, so a view cannot
depend on its neighbours.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from adclr import views as planning
from adclr.augment.photometric import BLUR_RADIUS
from adclr.augment.resample import num_taps
from adclr.augment.transfer import send_all

# A crop is 7 numbers of the table: where its first pixel lies, bytes of a row and of a channel of its image, its height
# and width, whether it is flipped, and where its half-resized form begins.
ENTRY = 7
# 7 choices: whether colours are jittered, made grey, solarised; the order of the jitter. 5 factors: its four, sigma.
CHOICES, FACTORS = 7, 5
ROWS, COLUMNS, PIXELS = 8, 128, 1024  # rows, columns and pixels a program works on at once
WARPS = 2  # of the resizing: two columns for each thread, so that a weight is loaded once for both
HALF = 2**27  # numbers of half-resized crops and weights held at once (512 MiB)


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
def _taps(length, size):
    """How many taps an output has at most."""
    return tl.ceil(4.0 * tl.maximum(length.to(tl.float32) / size, 1.0)).to(tl.int32) + 1


@triton.jit
def _mirrored(place, size, flip):
    return tl.where(flip > 0, size - 1 - place, place)


@triton.jit
def _weights(table, weights, size, most, ENTRY: tl.constexpr, OUTPUTS: tl.constexpr):
    """weights[crop, axis, tap, output], axis 0 down and 1 across: computed once, for every pixel to use; sum 1."""
    n, axis = tl.program_id(0), tl.program_id(1)
    entry = table + n * ENTRY
    length = tl.load(entry + 3 + axis).to(tl.int32)
    flip = tl.load(entry + 5).to(tl.int32) * axis
    place = tl.arange(0, OUTPUTS)
    center, wide, first, last = _reach(_mirrored(place, size, flip), length, size)
    write = weights + ((n.to(tl.int64) * 2 + axis) * most) * size + place
    inside = place < size
    total = tl.zeros((OUTPUTS,), tl.float32)
    count = _taps(length, size)
    for tap in range(count):
        at = first + tap
        total += tl.where(at < last, _cubic((at - center + 0.5) / wide), 0.0)
    for tap in range(count):
        at = first + tap
        weight = tl.where(at < last, _cubic((at - center + 0.5) / wide), 0.0)
        tl.store(write + tap * size, weight / total, mask=inside)


@triton.jit
def _down(
    data, table, weights, half, size, channels, most, ENTRY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Each column of each crop to `size` rows: half[start + (channel·size + row)·width + column]."""
    n = tl.program_id(0)
    entry = table + n * ENTRY
    base, stride, plane = tl.load(entry), tl.load(entry + 1).to(tl.int32), tl.load(entry + 2)
    height, width = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
    start = tl.load(entry + 6)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(2) * COLUMNS < width:
        inside = (row < size)[:, None] & (column < width)[None, :]
        _, _, first, _ = _reach(row, height, size)
        top = first.to(tl.int32)
        count = _taps(height, size)
        weight = weights + (n.to(tl.int64) * 2 * most) * size + row
        for channel in range(channels):
            read = data + base + channel * plane
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            for tap in range(count):
                factor = tl.load(weight + tap * size, mask=row < size, other=0.0)
                source = tl.minimum(top + tap, height - 1) * stride
                pixel = tl.load(read + (source[:, None] + column[None, :]), mask=inside, other=0)
                sums += pixel.to(tl.float32) * factor[:, None]
            write = half + start + channel * size * width
            tl.store(write + (row[:, None] * width + column[None, :]), sums, mask=inside)


@triton.jit
def _across(
    half, table, weights, crops, size, channels, most, ENTRY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The columns of `half` to `size` columns, flipped if need be: crops[crop, channel, row, column] in [0, 1]."""
    n = tl.program_id(0)
    entry = table + n * ENTRY
    width, flip = tl.load(entry + 4).to(tl.int32), tl.load(entry + 5).to(tl.int32)
    start = tl.load(entry + 6)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < size)[:, None] & (column < size)[None, :]
    _, _, first, _ = _reach(_mirrored(column, size, flip), width, size)
    left = first.to(tl.int32)
    count = _taps(width, size)
    weight = weights + ((n.to(tl.int64) * 2 + 1) * most) * size + column
    for channel in range(channels):
        read = half + start + channel * size * width
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for tap in range(count):
            factor = tl.load(weight + tap * size, mask=column < size, other=0.0)
            source = tl.minimum(left + tap, width - 1)
            value = tl.load(read + (row[:, None] * width + source[None, :]), mask=inside, other=0.0)
            sums += value * factor[None, :]
        value = tl.minimum(tl.maximum(sums, 0.0), 255.0) / 255.0
        write = crops + (n.to(tl.int64) * channels + channel) * size * size
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
def _load(base, at, pixels, inside):
    red = tl.load(base + at, mask=inside, other=0.0)
    green = tl.load(base + pixels + at, mask=inside, other=0.0)
    return red, green, tl.load(base + 2 * pixels + at, mask=inside, other=0.0)


@triton.jit
def _colours(crops, choices, factors, pixels, CHOICES: tl.constexpr, FACTORS: tl.constexpr, PIXELS: tl.constexpr):
    """Jitter in its order, then grey, in place; contrast needs the mean luma, so what precedes it is done twice."""
    n = tl.program_id(0).to(tl.int64)
    jitter, to_grey = tl.load(choices + n * CHOICES), tl.load(choices + n * CHOICES + 1)
    order, factors = choices + n * CHOICES + 3, factors + n * FACTORS
    base = crops + n * 3 * pixels
    mean = 0.0
    if jitter > 0:
        total = tl.zeros((PIXELS,), tl.float32)
        for begin in range(0, pixels, PIXELS):
            at = begin + tl.arange(0, PIXELS)
            inside = at < pixels
            r, g, b = _load(base, at, pixels, inside)
            before = 1  # until contrast comes
            for place in range(4):
                step = tl.load(order + place)
                before = tl.where(step == 1, 0, before)
                if before > 0:
                    r, g, b = _jitter(r, g, b, step, tl.load(factors + step), 0.0)
            total += tl.where(inside, _luma(r, g, b), 0.0)
        mean = tl.sum(total, axis=0) / pixels
    if (jitter > 0) | (to_grey > 0):
        for begin in range(0, pixels, PIXELS):
            at = begin + tl.arange(0, PIXELS)
            inside = at < pixels
            r, g, b = _load(base, at, pixels, inside)
            if jitter > 0:
                for place in range(4):
                    step = tl.load(order + place)
                    r, g, b = _jitter(r, g, b, step, tl.load(factors + step), mean)
            if to_grey > 0:
                luma = _luma(r, g, b)
                r, g, b = luma, luma, luma
            tl.store(base + at, r, mask=inside)
            tl.store(base + pixels + at, g, mask=inside)
            tl.store(base + 2 * pixels + at, b, mask=inside)


@triton.jit
def _blur(
    source,
    target,
    index,
    factors,
    size,
    channels,
    radius,
    ACROSS: tl.constexpr,
    FACTORS: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """A Gaussian along one axis, reflected at the border: across from the crops into a copy, down from it back."""
    k = tl.program_id(0)
    channel = tl.program_id(1)
    at = tl.program_id(2) * PIXELS + tl.arange(0, PIXELS)
    inside = at < size * size
    crop = tl.load(index + k)
    sigma = tl.load(factors + crop * FACTORS + 4)
    plane = (crop * channels + channel) * size * size
    own = (k.to(tl.int64) * channels + channel) * size * size
    if ACROSS:
        read, write, place, stride = source + plane, target + own, at % size, 1
    else:
        read, write, place, stride = source + own, target + plane, at // size, size
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
    tl.store(write + at, sums / total, mask=inside)


@triton.jit
def _finish(crops, choices, center, scale, pixels, channels, CHOICES: tl.constexpr, PIXELS: tl.constexpr):
    """Solarise where it is drawn, and normalise, in place."""
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    inside = at < channels * pixels
    x = tl.load(crops + n * channels * pixels + at, mask=inside, other=0.0)
    x = tl.where((tl.load(choices + n * CHOICES + 2) > 0) & (x >= 128.0 / 255.0), 1.0 - x, x)
    channel = at // pixels
    x = (x - tl.load(center + channel, mask=inside, other=0.0)) / tl.load(scale + channel, mask=inside, other=1.0)
    tl.store(crops + n * channels * pixels + at, x, mask=inside)


class _Resizing(NamedTuple):
    table: NDArray[np.int64]  # crops×ENTRY
    numbers: NDArray[np.int64]  # of the half-resized form of each
    most: int  # taps
    groups: list[slice]  # crops that are resized together


def _plan(packed: Any, count: int, boxes: NDArray[np.int64], flip: NDArray[np.bool_], size: int) -> _Resizing:
    """How `count` crops of each image, view-major, are resized."""
    sizes = np.tile(packed.sizes, (count, 1))
    table = np.empty((len(boxes), ENTRY), np.int64)
    table[:, 0] = np.tile(packed.offsets, count) + boxes[:, 0] * sizes[:, 1] + boxes[:, 1]
    table[:, 1], table[:, 2] = sizes[:, 1], sizes[:, 0] * sizes[:, 1]
    table[:, 3:5], table[:, 5] = boxes[:, 2:], flip
    most = num_taps(int(boxes[:, 2:].max()), size)
    numbers = packed.num_channels * size * boxes[:, 3]
    groups = _groups(numbers + 2 * size * most)
    for group in groups:
        table[group, 6] = np.cumsum(numbers[group]) - numbers[group]
    return _Resizing(table, numbers, most, groups)


def _resized(packed: Any, entries: Tensor, plan: _Resizing, boxes: NDArray[np.int64], size: int) -> Tensor:
    out = torch.empty(len(boxes), packed.num_channels, size, size, device=entries.device)
    for group in plan.groups:
        _resize(packed.bytes, entries[group], plan.most, boxes[group], int(plan.numbers[group].sum()), out[group])
    return out


def resize_crops(packed: Any, boxes: NDArray[np.int64], flip: NDArray[np.bool_], size: int) -> Tensor:
    """B×C×size×size in [0, 1], one crop of each image."""
    plan = _plan(packed, 1, boxes, flip, size)
    (entries,) = send_all([plan.table], packed.bytes.device)
    return _resized(packed, entries, plan, boxes, size)


def render_crops(packed: Any, crops: planning.Crops, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """V×B×C×S×S, as the plain `augment._render` makes them."""
    device, channels, size = packed.bytes.device, packed.num_channels, crops.size
    batch, count = crops.flip.shape
    number = batch * count

    def flat(array: NDArray[Any]) -> NDArray[Any]:
        return array.swapaxes(0, 1).reshape(number, *array.shape[2:])  # view-major, as the method wants them

    boxes = flat(crops.boxes)
    resizing = _plan(packed, count, boxes, flat(crops.flip), size)
    choices = np.empty((number, CHOICES), np.int32)
    choices[:, 0], choices[:, 1], choices[:, 2] = flat(crops.jitter), flat(crops.grey), flat(crops.solarise)
    choices[:, 3:] = flat(crops.order)
    factors = np.empty((number, FACTORS), np.float32)
    factors[:, :4], factors[:, 4] = flat(crops.factors), flat(crops.sigma)
    blurred = np.flatnonzero(factors[:, 4] > 0)
    entries, chosen, drawn, here = send_all([resizing.table, choices, factors, blurred], device)
    out = _resized(packed, entries, resizing, boxes, size)
    pixels = size * size
    if channels == 3 and choices[:, :2].any():
        _colours[(number,)](out, chosen, drawn, pixels, CHOICES=CHOICES, FACTORS=FACTORS, PIXELS=PIXELS)
    if len(blurred):
        temporary = torch.empty(len(blurred), channels, size, size, device=device)
        radius, grid = min(BLUR_RADIUS, size - 1), (len(blurred), channels, triton.cdiv(pixels, PIXELS))
        shape = {"FACTORS": FACTORS, "PIXELS": PIXELS}
        _blur[grid](out, temporary, here, drawn, size, channels, radius, ACROSS=True, **shape)
        _blur[grid](temporary, out, here, drawn, size, channels, radius, ACROSS=False, **shape)
    center, scale = _constants(mean, std, device)
    _finish[(number, triton.cdiv(channels * pixels, PIXELS))](
        out, chosen, center, scale, pixels, channels, CHOICES=CHOICES, PIXELS=PIXELS
    )
    return out.view(count, batch, channels, size, size)


@cache
def _constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    center, scale = send_all([np.array(mean, np.float32), np.array(std, np.float32)], device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # other streams will read them
    return center, scale


def _groups(numbers: NDArray[np.int64]) -> list[slice]:
    """Runs of crops that need at most `HALF` numbers together, or one crop."""
    ends, groups, first = np.cumsum(numbers), [], 0
    while first < len(numbers):
        before = ends[first] - numbers[first]
        last = max(first + 1, int(np.searchsorted(ends, before + HALF, "right")))
        groups.append(slice(first, last))
        first = last
    return groups


def _resize(data: Tensor, entries: Tensor, most: int, boxes: NDArray[np.int64], half_size: int, out: Tensor) -> None:
    """Crop and resize into `out`; `boxes` are the entries' on the host, for the sizes of the launches."""
    number, channels, size = out.shape[:3]
    half = torch.empty(half_size, device=out.device)
    weights = torch.empty(number, 2, most, size, device=out.device)
    _weights[(number, 2)](entries, weights, size, most, ENTRY=ENTRY, OUTPUTS=triton.next_power_of_2(size))
    rows, columns = triton.cdiv(size, ROWS), min(COLUMNS, triton.next_power_of_2(size))
    widest = triton.cdiv(int(boxes[:, 3].max()), COLUMNS)
    shape = {"ENTRY": ENTRY, "ROWS": ROWS, "num_warps": WARPS}
    _down[(number, rows, widest)](data, entries, weights, half, size, channels, most, COLUMNS=COLUMNS, **shape)
    _across[(number, rows, triton.cdiv(size, columns))](
        half, entries, weights, out, size, channels, most, COLUMNS=columns, **shape
    )
