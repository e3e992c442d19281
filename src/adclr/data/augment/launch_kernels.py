"""Launching of the kernels of `kernels.py` for the crops of a packed batch; their parameters are sent in one copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from adclr.data.augment import kernels
from adclr.data.augment.photometric import BLUR_RADIUS
from adclr.data.packed import Packed
from adclr.data.view_plan import Crops
from adclr.system.devices import send_all


class _Resizing(NamedTuple):
    """How crops are resized."""

    table: NDArray[np.int64]  # crops×ENTRY
    half_sizes: NDArray[np.int64]  # elements of the half-resized form of each
    groups: list[slice]  # crops that are resized together


def _plan(packed: Packed, count: int, boxes: NDArray[np.int64], flip: NDArray[np.bool_], size: int) -> _Resizing:
    """Plan the resizing of `count` crops of each image, view-major."""
    sizes = np.tile(packed.sizes, (count, 1))
    table = np.empty((len(boxes), kernels.ENTRY), np.int64)
    table[:, 0] = np.tile(packed.offsets, count) + boxes[:, 0] * sizes[:, 1] + boxes[:, 1]
    table[:, 1], table[:, 2] = sizes[:, 1], sizes[:, 0] * sizes[:, 1]
    table[:, 3:5], table[:, 5] = boxes[:, 2:], flip
    half_sizes = packed.num_channels * size * boxes[:, 3]
    groups = _groups(half_sizes + 2 * triton.cdiv(size, _tile(size)) * _tile(size) * _most(boxes, size))
    for group in groups:
        table[group, 6] = np.cumsum(half_sizes[group]) - half_sizes[group]
    return _Resizing(table, half_sizes, groups)


def _resize_groups(packed: Packed, entries: Tensor, plan: _Resizing, boxes: NDArray[np.int64], size: int) -> Tensor:
    """Return crops in [0, 1], less 0.5, in float16."""
    out = torch.empty(len(boxes), packed.num_channels, size, size, device=entries.device, dtype=torch.float16)
    for group in plan.groups:
        _resize(packed.bytes, entries[group], boxes[group], int(plan.half_sizes[group].sum()), out[group])
    return out


def resize_crops(packed: Packed, boxes: NDArray[np.int64], flip: NDArray[np.bool_], size: int) -> Tensor:
    """Return one crop of each image, B×C×size×size in [0, 1]."""
    plan = _plan(packed, 1, boxes, flip, size)
    (entries,) = send_all([plan.table], packed.bytes.device)
    return _resize_groups(packed, entries, plan, boxes, size).float() + 0.5


def render_crops(
    packed: Packed, kinds: Sequence[Crops], mean: tuple[float, ...], std: tuple[float, ...]
) -> list[Tensor]:
    """Return the crops of each kind, V×B×C×S×S, as the plain `augment._render` does; one copy sends all parameters."""
    device = packed.bytes.device
    drawn = [_parameters(packed, crops) for crops in kinds]
    sent = send_all([array for draw in drawn for array in (draw.resizing.table, draw.choices, draw.factors)], device)
    center, scale = _constants(mean, std, device)
    views = []
    for crops, draw, tensors in zip(kinds, drawn, (sent[i : i + 3] for i in range(0, len(sent), 3)), strict=True):
        batch, count = crops.flip.shape
        out = _render(packed, draw, crops.size, tensors, center, scale)
        views.append(out.view(count, batch, *out.shape[1:]))
    return views


class _Parameters(NamedTuple):
    """What is drawn for each crop, view-major, as the method expects them."""

    boxes: NDArray[np.int64]
    resizing: _Resizing
    choices: NDArray[np.int32]
    factors: NDArray[np.float32]


def _parameters(packed: Packed, crops: Crops) -> _Parameters:
    batch, count = crops.flip.shape
    number = batch * count

    def flat(array: NDArray[Any]) -> NDArray[Any]:
        return array.swapaxes(0, 1).reshape(number, *array.shape[2:])

    boxes = flat(crops.boxes)
    choices = np.empty((number, kernels.CHOICES), np.int32)
    choices[:, 0], choices[:, 1], choices[:, 2] = flat(crops.jitter), flat(crops.gray), flat(crops.solarize)
    choices[:, 3:] = flat(crops.order)
    factors = np.empty((number, kernels.FACTORS), np.float32)
    factors[:, :4], factors[:, 4] = flat(crops.factors), flat(crops.sigma)
    return _Parameters(boxes, _plan(packed, count, boxes, flat(crops.flip), crops.size), choices, factors)


def _render(
    packed: Packed, drawn: _Parameters, size: int, sent: Sequence[Tensor], center: Tensor, scale: Tensor
) -> Tensor:
    """Return crops×C×size×size; `sent` are their table, choices and factors on the device."""
    entries, chosen, factors = sent
    number, channels = len(drawn.boxes), packed.num_channels
    crops = _resize_groups(packed, entries, drawn.resizing, drawn.boxes, size)
    if channels == 3 and drawn.choices[:, :2].any():
        kernels._colors[(number,)](
            crops, chosen, factors, size * size, CHOICES=kernels.CHOICES, FACTORS=kernels.FACTORS, PIXELS=kernels.PIXELS
        )
    out = torch.empty(number, channels, size, size, device=crops.device)
    tile, radius = _tile(size), min(BLUR_RADIUS, size - 1)
    kernels._finish[(number, channels * triton.cdiv(size, tile) ** 2)](
        crops, out, chosen, factors, center, scale, size, channels, radius,
        CHOICES=kernels.CHOICES, FACTORS=kernels.FACTORS, TILE=tile, REACH=triton.next_power_of_2(tile + 2 * radius),
    )  # fmt: skip
    return out


@cache
def _constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    center, scale = send_all([np.array(mean, np.float32), np.array(std, np.float32)], device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # other streams read them
    return center, scale


def _groups(numbers: NDArray[np.int64]) -> list[slice]:
    """Return runs of crops that need at most `kernels.HALF` elements together, or one crop."""
    ends, groups, first = np.cumsum(numbers), [], 0
    while first < len(numbers):
        before = ends[first] - numbers[first]
        last = max(first + 1, int(np.searchsorted(ends, before + kernels.HALF, "right")))
        groups.append(slice(first, last))
        first = last
    return groups


def _resize(data: Tensor, entries: Tensor, boxes: NDArray[np.int64], half_size: int, out: Tensor) -> None:
    """Crop and resize into `out`; `boxes` are those of the entries, on the host, for the sizes of the launches."""
    number, channels, size = out.shape[:3]
    half = torch.empty(half_size, device=out.device, dtype=torch.float16)
    tile = _tile(size)
    blocks, most = triton.cdiv(size, tile), _most(boxes, size)
    bands = torch.empty(number, 2, blocks, tile, most, device=out.device, dtype=torch.float16)
    totals = torch.empty(number, 2, blocks, tile, device=out.device)
    kernels._bands[(number, 2, blocks)](
        entries, bands, totals, size, blocks, most, ENTRY=kernels.ENTRY, OUTPUTS=tile, DEPTH=kernels.DEPTH
    )
    shape = {
        "ENTRY": kernels.ENTRY,
        "ROWS": tile,
        "DEPTH": kernels.DEPTH,
        "num_warps": kernels.WARPS,
        "num_stages": kernels.STAGES,
    }
    sizes = (size, channels, blocks, most)
    widest = triton.cdiv(int(boxes[:, 3].max()), kernels.COLUMNS)
    kernels._down[(number, blocks, widest)](
        data, entries, bands, totals, half, *sizes, COLUMNS=kernels.COLUMNS, **shape
    )
    kernels._across[(number, blocks, blocks)](half, entries, bands, totals, out, *sizes, COLUMNS=tile, **shape)


def _tile(size: int) -> int:
    """Return the outputs of one matrix product, whose sides are at least 16."""
    return int(min(kernels.TILE, max(16, triton.next_power_of_2(size))))


def _most(boxes: NDArray[np.int64], size: int) -> int:
    """Return how many sources the outputs of one tile reach together at most, in whole steps of a product."""
    scale = max(1.0, int(boxes[:, 2:].max()) / size)
    reach = math.ceil((_tile(size) - 1) * scale + 4 * scale) + 2
    return -(-reach // kernels.DEPTH) * kernels.DEPTH
