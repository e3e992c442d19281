"""Random crops of images and their labels at random scales, for evaluations that train on pixels.

As in mmsegmentation: the shorter side is resized to `size` times a random scale, and a square of `size` pixels is cut
in which no class fills more than three quarters (ten tries); then flip, brightness, contrast, saturation and hue.
Pixels outside the image have the mean color and are ignored. Crops are cut in batches on the device, straight from the
decoded images; those of a pair depend only on (seed, epoch, key).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adclr.config.parsing import UserError
from adclr.data.augment.photometric import hue
from adclr.data.feed import Batch, Feed, Prefetcher
from adclr.data.packed import Packed
from adclr.data.random_draws import Draws, Keys, epoch_order
from adclr.data.sets.pixels import IGNORE, PairDecoder, Pairs
from adclr.evals.frames import fit_size
from adclr.evals.mixing import drop_path_scales
from adclr.features.reader import normalizer
from adclr.system import distributed, machine
from adclr.system.devices import send, send_all
from adclr.weights.backbone import Weights

TRIES, MAX_CLASS_SHARE, SAMPLE_EVERY = 10, 0.75, 4  # a try is judged by every fourth pixel
BRIGHTNESS, FACTORS, HUE = 32 / 255, (0.5, 1.5), 18 / 180  # 18 of OpenCV's 180 hues
NUM_COLOR_DRAWS = 7  # random numbers for the colors of a crop


@dataclass(frozen=True)
class ScaledCropPlan:
    """The possible crops of a batch in the resized images, and all further random choices for each image."""

    sizes: NDArray[np.int64]  # B×2, of the resized images
    corners: NDArray[np.int64]  # B×TRIES×2, top and left
    flip: NDArray[np.bool_]  # B
    colors: NDArray[np.float32]  # B×NUM_COLOR_DRAWS, see `distort_colors`
    draws: Draws


@dataclass(frozen=True)
class PixelBatch:
    """Crops with the labels of their pixels."""

    images: Tensor  # B×C×S×S, normalized
    labels: Tensor  # B×S×S, int64
    path_scales: Tensor | None  # factors of drop path, see `mixing.drop_path_scales`
    positions: NDArray[np.int64]  # B, in the sequence of all epochs
    draws: Draws

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the batch."""
        return [self.images, self.labels] if self.path_scales is None else [self.images, self.labels, self.path_scales]


class ScaledCrops:
    """Batches of a split; `batch_size` is that of all processes, of which each gets its part."""

    def __init__(
        self,
        weights: Weights,
        pairs: Pairs,
        decoder: PairDecoder,
        device: torch.device,
        size: int,
        batch_size: int,
        seed: int,
        scales: tuple[float, float] = (0.5, 2.0),
        drop_path: float = 0.0,
        num_workers: int | None = None,
        max_unreadable: float = 0.1,
    ) -> None:
        if batch_size % distributed.world_size():
            raise UserError(f"batch_size={batch_size} does not divide by {distributed.world_size()} processes")
        self.pairs, self.device, self.size, self.batch_size = pairs, device, size, batch_size
        self.seed, self.scales, self.drop_path, self.depth = seed, scales, drop_path, weights.vit.depth
        self.weights, self.patch = weights, weights.vit.patch_size
        self.feed = Feed(pairs, num_workers or machine.cpu_count(), decoder, max_unreadable, pin=device.type == "cuda")
        self.feed.keep("auto", device)

    def _order(self, start: int, end: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the first position and the indices of this process's pairs in each step; positions count all epochs."""
        count, local_size = len(self.pairs), self.batch_size // distributed.world_size()
        orders: dict[int, NDArray[np.int64]] = {}
        for step in range(start, end):
            first = step * self.batch_size + distributed.rank() * local_size
            positions = np.arange(first, first + local_size)
            epochs = np.unique(positions // count).tolist()
            orders = {e: orders[e] if e in orders else epoch_order(self.seed, e, self.pairs.keys) for e in epochs}
            yield first, np.array([orders[position // count][position % count] for position in positions.tolist()])

    def _plan(self, first: int, keys: Keys, sizes: NDArray[np.int64]) -> ScaledCropPlan:
        epochs = (first + np.arange(len(keys))) // len(self.pairs)
        draws = Draws(self.seed, int(epochs[0]), keys)
        for epoch in np.unique(epochs)[1:].tolist():  # a batch may run from one epoch into the next
            draws.state[epochs == epoch] = Draws(self.seed, epoch, keys[epochs == epoch]).state
        scale = draws.uniform("scale", 1, low=self.scales[0], high=self.scales[1])[:, 0]
        sides = np.maximum(self.patch, np.rint(scale * self.size)).astype(np.int64)
        resized = np.array([fit_size((h, w), s, 1) for (h, w), s in zip(sizes.tolist(), sides.tolist(), strict=True)])
        max_corner = np.maximum(0, resized - self.size)[:, None]
        corners = np.floor(draws.uniform("corner", TRIES, 2) * (max_corner + 1)).astype(np.int64)
        # the names of draws decide their values and so never change, nor does their spelling
        colors = draws.uniform("colours", NUM_COLOR_DRAWS, low=-1.0, high=1.0).astype(np.float32)
        colors[draws.chance("coloured", 0.5, NUM_COLOR_DRAWS)] = 0.0
        colors[:, -1] = draws.uniform("contrast first", 1)[:, 0] < 0.5
        return ScaledCropPlan(resized, corners, draws.chance("flip", 0.5, 1)[:, 0], colors, draws)

    def batches(self, start: int, end: int, distort: bool = True) -> Prefetcher[PixelBatch]:
        """Return an iterator, to be closed, over this process's batches of steps `start` to `end` - 1."""

        def make_batch(batch: Batch[ScaledCropPlan]) -> PixelBatch:
            plan = batch.plan
            images, labels, inside = crop(batch.packed.to(self.device), plan, self.size)
            if distort and images.shape[1] == 3:
                images = distort_colors(images, send(plan.colors, self.device))
            images = normalizer(self.weights, self.device)(images) * inside.unsqueeze(1)
            path_scales = drop_path_scales(plan.draws, self.depth, self.drop_path, self.device)
            positions = batch.epoch + np.arange(len(batch.indices))  # `_order` yields the first position as the epoch
            return PixelBatch(images, labels, path_scales, positions, plan.draws)

        return Prefetcher(self.feed.batches(self._order(start, end), self._plan), make_batch, self.device)


@torch.no_grad()
def crop(packed: Packed, plan: ScaledCropPlan, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return images in [0, 1], B×C×S×S, bilinear; labels B×S×S, nearest; and whether pixels lie inside, B×S×S.

    The pixels of all crops are gathered from `packed.bytes` at once.
    """
    data, channels = packed.bytes, packed.num_channels - 1
    geometry = np.concatenate([packed.offsets[:, None], packed.sizes, plan.sizes], axis=1)
    numbers, corners, flip = send_all([geometry, plan.corners, plan.flip], data.device)
    start, height, width, resized_height, resized_width = numbers.T[..., None]  # each B×1
    plane = height * width
    axis = torch.arange(size, device=data.device)

    def labels_at(rows: Tensor, columns: Tensor) -> Tensor:
        """Return the labels at m rows and n columns of the resized images for each of T tries, B×T×m×n."""
        y = ((rows + 0.5) * (height / resized_height)[:, None]).long().minimum(height[:, None] - 1)
        x = ((columns + 0.5) * (width / resized_width)[:, None]).long().minimum(width[:, None] - 1)
        first = (start + channels * plane)[:, None, None]
        values = data[first + (y * width[:, None])[..., None] + x[..., None, :]]
        inside = (rows < resized_height[:, None])[..., None] & (columns < resized_width[:, None])[..., None, :]
        return torch.where(inside, values, IGNORE)

    sample = axis[::SAMPLE_EVERY]
    accepted = _is_mixed(labels_at(corners[..., :1] + sample, corners[..., 1:] + sample))
    accepted[:, -1] = True  # the last try is always accepted
    chosen = accepted.int().argmax(dim=1)  # the first accepted
    top, left = corners[torch.arange(len(corners), device=data.device), chosen].T[..., None]
    rows, columns = top + axis, left + torch.where(flip[:, None], size - 1 - axis, axis)
    inside = (rows < resized_height)[:, :, None] & (columns < resized_width)[:, None]

    y = ((rows + 0.5) * height / resized_height - 0.5).clamp(min=0)
    x = ((columns + 0.5) * width / resized_width - 0.5).clamp(min=0)
    y0, x0 = y.long().minimum(height - 1), x.long().minimum(width - 1)
    y1, x1 = (y0 + 1).minimum(height - 1), (x0 + 1).minimum(width - 1)
    down, across = (y - y0).clamp(max=1)[:, None, :, None], (x - x0).clamp(max=1)[:, None, None]
    planes = (start + torch.arange(channels, device=data.device) * plane)[:, :, None, None]

    def pixel(at_y: Tensor, at_x: Tensor) -> Tensor:
        return data[planes + (at_y * width)[:, None, :, None] + at_x[:, None, None]].float()

    upper = torch.lerp(pixel(y0, x0), pixel(y0, x1), across)
    images = torch.lerp(upper, torch.lerp(pixel(y1, x0), pixel(y1, x1), across), down) / 255
    return images, labels_at(rows[:, None], columns[:, None])[:, 0].long(), inside


def _is_mixed(labels: Tensor) -> Tensor:
    """Return for each try, B×T, whether no class fills too large a share of the pixels that are not ignored."""
    flat = labels.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, device=labels.device)
    counts = counts.scatter_add_(2, flat, torch.ones_like(flat, dtype=torch.float32))[..., :IGNORE]
    return counts.amax(dim=-1) < MAX_CLASS_SHARE * counts.sum(dim=-1)


def distort_colors(x: Tensor, colors: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue, each by its number in [-1, 1]; 0 changes nothing."""
    brightness, first, last, saturation, hue_shift = (colors[:, i].view(-1, 1, 1, 1) for i in range(5))
    contrast_first = colors[:, -1].view(-1, 1, 1, 1)
    x = (x + BRIGHTNESS * brightness).clamp_(0, 1)
    x = (x * _factor(first * contrast_first)).clamp_(0, 1)
    value = x.amax(dim=1, keepdim=True)
    x = (value - (value - x) * _factor(saturation)).clamp_(0, 1)
    x = hue(x, HUE * hue_shift)
    return (x * _factor(last * (1 - contrast_first))).clamp_(0, 1)


def _factor(number: Tensor) -> Tensor:
    """Map [-1, 1] to the range of factors, 0 to 1."""
    low, high = FACTORS
    return 1 + number * torch.where(number < 0, 1 - low, high - 1)
