"""Random crops of images and their labels at random scales, for evaluations that train on pixels.

mmsegmentation's way: the shorter side to `size` times a random scale, a square of `size` pixels out of that in which no
class fills more than three quarters (ten tries), a flip, brightness, contrast, saturation and hue. What lies outside an
image is its mean colour and ignored. Cut in batches on the device, straight from the decoded images; what a pair is
shown as depends on (seed, epoch, key) alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adclr.config.sections import UserError
from adclr.data.augment.photometric import hue
from adclr.data.draws import Draws, Words, epoch_order
from adclr.data.feed import Batch, Feed
from adclr.data.packed import Packed
from adclr.data.prefetch import Ahead
from adclr.data.sets.pixels import IGNORE, PairDecoder, Pairs
from adclr.evals.frames import fitting
from adclr.evals.mixing import kept
from adclr.system import distributed, machine
from adclr.system.devices import send_all
from adclr.weights.backbone import Weights

TRIES, MOST_OF_ONE, LOOK_EVERY = 10, 0.75, 4  # pixels between those that are looked at
BRIGHTNESS, FACTORS, HUE = 32 / 255, (0.5, 1.5), 18 / 180  # 18 of OpenCV's 180 hues
COLOURS = 7  # numbers that say how colours are changed


@dataclass(frozen=True)
class Cut:
    """Where the crops of a batch may lie in the resized images, and what else is drawn for each of them."""

    sizes: NDArray[np.int64]  # B×2, of the resized images
    corners: NDArray[np.int64]  # B×TRIES×2, top and left
    flip: NDArray[np.bool_]  # B
    colours: NDArray[np.float32]  # B×COLOURS
    draws: Draws


@dataclass(frozen=True)
class Shown:
    images: Tensor  # B×C×S×S, normalised
    labels: Tensor  # B×S×S, int64
    kept: Tensor | None  # what drop path multiplies with
    places: NDArray[np.int64]  # in the row of all epochs
    draws: Draws

    def tensors(self) -> list[Tensor]:
        return [self.images, self.labels] if self.kept is None else [self.images, self.labels, self.kept]


class ScaledCrops:
    """Batches of a split. `batch_size` is of all processes; each gets its part of every batch."""

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
        self.mean, self.std, self.patch = weights.mean, weights.std, weights.vit.patch_size
        self.feed = Feed(pairs, num_workers or machine.cpu_count(), decoder, max_unreadable, pin=device.type == "cuda")
        self.feed.keep("auto", device)

    def _order(self, start: int, end: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(number of the first place, indices) of each step of this process; places run through epoch after epoch."""
        count, local = len(self.pairs), self.batch_size // distributed.world_size()
        orders: dict[int, NDArray[np.int64]] = {}
        for step in range(start, end):
            first = step * self.batch_size + distributed.rank() * local
            places = np.arange(first, first + local)
            epochs = np.unique(places // count).tolist()
            orders = {e: orders[e] if e in orders else epoch_order(self.seed, e, self.pairs.keys) for e in epochs}
            yield first, np.array([orders[place // count][place % count] for place in places.tolist()])

    def _plan(self, first: int, keys: Words, sizes: NDArray[np.int64]) -> Cut:
        epochs = (first + np.arange(len(keys))) // len(self.pairs)
        draws = Draws(self.seed, int(epochs[0]), keys)
        for epoch in np.unique(epochs)[1:].tolist():  # a batch may run from one epoch into the next
            draws.state[epochs == epoch] = Draws(self.seed, epoch, keys[epochs == epoch]).state
        scale = draws.uniform("scale", 1, low=self.scales[0], high=self.scales[1])[:, 0]
        sides = np.maximum(self.patch, np.rint(scale * self.size)).astype(np.int64)
        resized = np.array([fitting((h, w), s, 1) for (h, w), s in zip(sizes.tolist(), sides.tolist(), strict=True)])
        room = np.maximum(0, resized - self.size)[:, None]
        corners = np.floor(draws.uniform("corner", TRIES, 2) * (room + 1)).astype(np.int64)
        colours = draws.uniform("colours", COLOURS, low=-1.0, high=1.0).astype(np.float32)
        colours[draws.chance("coloured", 0.5, COLOURS)] = 0.0
        colours[:, -1] = draws.uniform("contrast first", 1)[:, 0] < 0.5
        return Cut(resized, corners, draws.chance("flip", 0.5, 1)[:, 0], colours, draws)

    def batches(self, start: int, end: int, alter_colours: bool = True) -> Ahead[Shown]:
        """What this process sees in steps start..end; an iterator that is to be closed."""

        def make(batch: Batch[Cut]) -> Shown:
            cut = batch.plan
            images, labels, inside = crop(batch.packed.to(self.device), cut, self.size)
            (colours, mean, std) = send_all(
                [cut.colours, np.array(self.mean, np.float32), np.array(self.std, np.float32)], self.device
            )
            if alter_colours and images.shape[1] == 3:
                images = distorted(images, colours)
            images = (images - mean.view(-1, 1, 1)) / std.view(-1, 1, 1) * inside.unsqueeze(1)
            dropped = kept(cut.draws, self.depth, self.drop_path, self.device)
            places = batch.epoch + np.arange(len(batch.indices))  # what `_order` gave
            return Shown(images, labels, dropped, places, cut.draws)

        return Ahead(self.feed.batches(self._order(start, end), self._plan), make, self.device)


@torch.no_grad()
def crop(packed: Packed, cut: Cut, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(images in [0, 1] B×C×S×S, bilinear; labels B×S×S, nearest; which pixels lie inside, B×S×S).

    Every pixel is gathered from where its image lies in `packed.bytes`, those of all images at once.
    """
    data, channels = packed.bytes, packed.num_channels - 1
    places = np.concatenate([packed.offsets[:, None], packed.sizes, cut.sizes], axis=1)
    numbers, corners, flip = send_all([places, cut.corners, cut.flip], data.device)
    start, height, width, tall, wide = numbers.T[..., None]  # each B×1
    plane = height * width
    axis = torch.arange(size, device=data.device)

    def labels_at(rows: Tensor, columns: Tensor) -> Tensor:
        """B×T×m×n values, T times those at m rows and n columns of the resized images."""
        y = ((rows + 0.5) * (height / tall)[:, None]).long().minimum(height[:, None] - 1)
        x = ((columns + 0.5) * (width / wide)[:, None]).long().minimum(width[:, None] - 1)
        first = (start + channels * plane)[:, None, None]
        values = data[first + (y * width[:, None])[..., None] + x[..., None, :]]
        inside = (rows < tall[:, None])[..., None] & (columns < wide[:, None])[..., None, :]
        return torch.where(inside, values, IGNORE)

    looked = axis[::LOOK_EVERY]
    fits = _mixed(labels_at(corners[..., :1] + looked, corners[..., 1:] + looked))
    fits[:, -1] = True  # the last try is taken however it is
    chosen = fits.int().argmax(dim=1)  # the first that fits
    top, left = corners[torch.arange(len(corners), device=data.device), chosen].T[..., None]
    rows, columns = top + axis, left + torch.where(flip[:, None], size - 1 - axis, axis)
    inside = (rows < tall)[:, :, None] & (columns < wide)[:, None]

    y = ((rows + 0.5) * height / tall - 0.5).clamp(min=0)
    x = ((columns + 0.5) * width / wide - 0.5).clamp(min=0)
    y0, x0 = y.long().minimum(height - 1), x.long().minimum(width - 1)
    y1, x1 = (y0 + 1).minimum(height - 1), (x0 + 1).minimum(width - 1)
    down, across = (y - y0).clamp(max=1)[:, None, :, None], (x - x0).clamp(max=1)[:, None, None]
    planes = (start + torch.arange(channels, device=data.device) * plane)[:, :, None, None]

    def pixel(at_y: Tensor, at_x: Tensor) -> Tensor:
        return data[planes + (at_y * width)[:, None, :, None] + at_x[:, None, None]].float()

    upper = torch.lerp(pixel(y0, x0), pixel(y0, x1), across)
    images = torch.lerp(upper, torch.lerp(pixel(y1, x0), pixel(y1, x1), across), down) / 255
    return images, labels_at(rows[:, None], columns[:, None])[:, 0].long(), inside


def _mixed(labels: Tensor) -> Tensor:
    """B×T×m×n -> B×T: whether no class fills more than its share of what is not ignored."""
    flat = labels.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, device=labels.device)
    counts = counts.scatter_add_(2, flat, torch.ones_like(flat, dtype=torch.float32))[..., :IGNORE]
    return counts.amax(dim=-1) < MOST_OF_ONE * counts.sum(dim=-1)


def distorted(x: Tensor, colours: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue, each by its number in [-1, 1]: 0 leaves things as they are."""
    light, first, last, fullness, turn = (colours[:, i].view(-1, 1, 1, 1) for i in range(5))
    before = colours[:, -1].view(-1, 1, 1, 1)
    x = (x + BRIGHTNESS * light).clamp_(0, 1)
    x = (x * _factor(first * before)).clamp_(0, 1)
    value = x.amax(dim=1, keepdim=True)
    x = (value - (value - x) * _factor(fullness)).clamp_(0, 1)
    x = hue(x, HUE * turn)
    return (x * _factor(last * (1 - before))).clamp_(0, 1)


def _factor(number: Tensor) -> Tensor:
    low, high = FACTORS
    return 1 + number * torch.where(number < 0, 1 - low, high - 1)
