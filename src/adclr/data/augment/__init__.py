"""Rendering of views: `render(packed images, plan) -> Views`, a batch at a time, on the device of the images.

Here in plain torch operations, correct on every device; on a GPU `kernels` does the same 20 times as fast. A view
depends on its own image and plan alone, to the bit: no matrix product is used, whose blocking could change with the
neighbors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adclr.data.augment.photometric import photometric
from adclr.data.augment.resample import resample, resample_each
from adclr.data.packed import Packed
from adclr.data.view_plan import BatchPlan, Crops
from adclr.model.named_tensors import Masks, Views
from adclr.system import triton_available
from adclr.system.devices import send


@torch.no_grad()
def render(packed: Packed, plan: BatchPlan, mean: tuple[float, ...], std: tuple[float, ...]) -> Views:
    """Render all views of a batch, normalized, float32."""
    kinds = [crops for crops in (plan.global_crops, plan.local_crops, plan.queries) if crops is not None]
    if packed.bytes.is_cuda and triton_available.possible:
        from adclr.data.augment.launch_kernels import render_crops

        rendered = iter(render_crops(packed, kinds, mean, std))
    else:
        rendered = (_render(packed, crops, mean, std) for crops in kinds)
    global_crops = next(rendered)
    local_crops = None if plan.local_crops is None else next(rendered)
    queries = None if plan.queries is None else next(rendered)
    return Views(
        global_crops,
        local_crops,
        None if queries is None else queries.transpose(0, 1).contiguous(),
        None if plan.masks is None else _masks(plan.masks, packed.bytes.device, plan.masked_rows),
    )


def _render(packed: Packed, crops: Crops, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return V×B×C×S×S, in plain torch operations."""
    device = packed.bytes.device
    batch, count = crops.flip.shape

    def flat(array: NDArray[Any]) -> NDArray[Any]:
        """Return the rows of all crops, view-major, as the method expects them."""
        return array.swapaxes(0, 1).reshape(batch * count, *array.shape[2:])

    images = np.tile(np.arange(batch), count)
    x = _resample(packed, images, flat(crops.boxes), flat(crops.flip), crops.size)
    drawn = (crops.jitter, crops.factors, crops.order, crops.gray, crops.sigma, crops.solarize)
    x = photometric(x, *map(flat, drawn))
    center, scale = (send(np.array(numbers, np.float32).reshape(-1, 1, 1), device) for numbers in (mean, std))
    x = (x - center) / scale
    return x.view(count, batch, *x.shape[1:])


@torch.no_grad()
def crop(packed: Packed, boxes: NDArray[np.int64], flip: NDArray[np.bool_], size: int) -> Tensor:
    """Return one crop of each image, B×C×size×size in [0, 1]: resized, perhaps flipped, and nothing else."""
    if packed.bytes.is_cuda and triton_available.possible:
        from adclr.data.augment.launch_kernels import resize_crops

        return resize_crops(packed, boxes, flip, size)
    return _resample(packed, np.arange(len(boxes)), boxes, flip, size)


def _resample(
    packed: Packed, images: NDArray[np.int64], boxes: NDArray[np.int64], flip: NDArray[np.bool_], size: int
) -> Tensor:
    """Return crops of some of the images, in the way that is faster on their device."""
    resize = resample if packed.bytes.is_cuda else resample_each
    offsets, sizes = packed.offsets[images], packed.sizes[images]
    return resize(packed.bytes, offsets, sizes, boxes, flip, size, packed.num_channels)


def _masks(grid: NDArray[np.bool_], device: torch.device, rows: int) -> Masks:
    """Return masks on the device; the host finds the hidden patches, so that it need not wait for the device."""
    by_view = grid.transpose(1, 0, 2)  # 2×B×N
    index, weight = _hidden(by_view, rows if device.type == "cuda" else 0)
    return Masks(send(by_view, device), send(index, device), send(weight, device))


def _hidden(by_view: NDArray[np.bool_], rows: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return positions and weights of hidden patches, padded to so many rows by visible patches of weight 0."""
    hidden = np.maximum(1, by_view.sum(axis=-1, keepdims=True))
    weight = np.where(by_view, 1.0 / (hidden * by_view.shape[0] * by_view.shape[1]), 0.0).reshape(-1)
    index = np.flatnonzero(by_view)
    index = np.concatenate([index, np.flatnonzero(~by_view)[: max(0, rows - len(index))]])
    return index, weight[index].astype(np.float32)
