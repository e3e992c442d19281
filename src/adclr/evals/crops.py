"""Random crops of labelled images, for evaluations that train: made on the device while the network works.

The way of pretraining's views, without its views: a collection that fits is decoded once and kept, on the GPU if it
fits there; else it is decoded as it is needed. What an image is shown as depends on (seed, epoch, key) alone, so
neither threads nor processes nor a resume change it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adclr.config.sections import UserError
from adclr.data.augment import crop
from adclr.data.draws import Draws, Words, crop_boxes, epoch_order
from adclr.data.feed import Batch, Feed
from adclr.data.nvjpeg import GpuDecoder
from adclr.data.prefetch import Ahead
from adclr.data.sets.classes import Labelled
from adclr.evals.features import check_classes
from adclr.evals.task import Task
from adclr.model.vit import VisionTransformer
from adclr.system import distributed, machine
from adclr.system.devices import send
from adclr.system.text import printable
from adclr.weights.backbone import Weights

ASPECT = (3 / 4, 4 / 3)  # width over height of ImageNet's random resized crop


@dataclass(frozen=True)
class Cut:
    """What is cut out of a batch of images, and what else is drawn for each of them."""

    boxes: NDArray[np.int64]  # B×4
    flip: NDArray[np.bool_]  # B
    draws: Draws


@dataclass(frozen=True)
class Shown:
    images: Tensor  # B×C×S×S, normalised
    labels: Tensor  # B
    more: list[Tensor]  # what else `alter` made

    def tensors(self) -> list[Tensor]:
        return [self.images, self.labels, *self.more]


Alter = Callable[[Tensor, Draws], tuple[Tensor, list[Tensor]]]  # crops in [0, 1] -> normalised ones, and more


class Crops:
    """Batches of the train split. `batch_size` is global; each process gets its part, of whole `pairs` if need be."""

    def __init__(
        self,
        weights: Weights,
        labelled: Labelled,
        settings: Task,
        device: torch.device,
        size: int,
        batch_size: int,
        min_crop: float,
        pairs: bool = False,
    ) -> None:
        self.split, self.classes, self.seed = labelled.train, labelled.classes, settings.seed
        self.device, self.size, self.min_crop = device, size, min_crop
        self.batch_size = fitting(batch_size, len(self.split.labels), (1 + pairs) * distributed.world_size())
        self.steps_per_epoch = len(self.split.labels) // self.batch_size
        self.unreadable: dict[str, str] = {}
        self.feed = Feed(
            self.split.source,
            settings.num_workers or machine.cpu_count(),
            weights.decoder,
            settings.max_unreadable,
            pin=device.type == "cuda",
            on_unreadable=self.unreadable.__setitem__,
            gpu_decoder=GpuDecoder(weights.decoder, device) if GpuDecoder.suits(device) else None,
        )
        self.feed.keep("auto", device)
        if self.feed.store is not None:
            self.check()

    def check(self) -> None:
        """Refuses a split of which a whole class cannot be read; known once every image has been looked at."""
        listed = np.fromiter(self.feed.unreadable, np.int64)
        check_classes(self.split, np.delete(self.split.labels, listed), self.classes)
        for path, reason in list(self.unreadable.items())[:5] if distributed.is_main() else ():
            print(printable(f"skipped {path}: {reason}"), file=sys.stderr)

    def num_readable(self) -> int:
        """As far as any process has seen."""
        return len(self.split.labels) - self.feed.num_unreadable()

    def _order(self, start: int, end: int, micro: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        keys, local = self.split.source.keys, self.batch_size // distributed.world_size()
        for step in range(start, end):
            epoch, place = divmod(step, self.steps_per_epoch)
            if place == 0 or step == start:
                order = epoch_order(self.seed, epoch, keys)
            first = place * self.batch_size + distributed.rank() * local
            for begin in range(first, first + local, micro):
                yield epoch, order[begin : begin + micro]

    def _plan(self, epoch: int, keys: Words, sizes: NDArray[np.int64]) -> Cut:
        draws = Draws(self.seed, epoch, keys)
        boxes = crop_boxes(draws, "train", 1, sizes, (self.min_crop, 1.0), ASPECT)[:, 0]
        return Cut(boxes, draws.chance("train flip", 0.5, 1)[:, 0], draws)

    def batches(self, start: int, end: int, micro: int, alter: Alter) -> Ahead[Shown]:
        """What this process sees in steps start..end, `micro` images at once; an iterator that is to be closed.

        The place of an unreadable image is taken by the next one that can be read, with that one's label.
        """

        def make(batch: Batch[Cut]) -> Shown:
            cut = batch.plan
            crops = crop(batch.packed.to(self.device), cut.boxes, cut.flip, self.size)
            images, more = alter(crops, cut.draws)
            return Shown(images, send(self.split.labels[self.feed.shown(batch.indices)], self.device), more)

        return Ahead(self.feed.batches(self._order(start, end, micro), self._plan), make, self.device)


def fitting(batch_size: int, num_images: int, unit: int) -> int:
    """The batch that is taken: of few images all, but for those that are no whole `unit`."""
    if batch_size % unit:
        raise UserError(f"batch_size={batch_size} does not divide by {unit}; choose one that does")
    if num_images < unit:
        raise UserError(f"{num_images} images for training are too few; {unit} at least are needed")
    return batch_size if num_images >= batch_size else num_images // unit * unit


def side(vit: VisionTransformer, size: int | None) -> int:
    """The side of the crops: the one that is set, or that of the images the backbone was trained on."""
    height, width = vit.input_size
    if size is None and height != width:
        raise UserError(f"the backbone was made for images of {height}x{width} pixels, and crops are square; set size")
    chosen = size or height
    if chosen % vit.patch_size:
        raise UserError(f"size={chosen} is not divisible by patches of {vit.patch_size} pixels; choose one that is")
    return chosen
