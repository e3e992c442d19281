"""Random crops of labeled images for evaluations that train, made on the device while the network works.

Images are decoded once and cached, on the GPU if they fit there, else in memory; a larger collection is decoded in
every epoch. The crop of an image depends only on (seed, epoch, key), so threads, processes and a resume do not change
it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adclr.config.parsing import UserError
from adclr.data.augment import crop
from adclr.data.feed import Batch, Feed, Prefetcher
from adclr.data.nvjpeg import GpuDecoder
from adclr.data.random_draws import Draws, Keys, crop_boxes, epoch_order
from adclr.data.sets.classes import LabeledImages
from adclr.evals.features import check_classes
from adclr.evals.task import ClassificationSettings
from adclr.system import distributed, machine
from adclr.system.devices import send
from adclr.system.text import printable
from adclr.weights.backbone import Weights

ASPECT = (3 / 4, 4 / 3)  # width over height of ImageNet's random resized crop


@dataclass(frozen=True)
class CropPlan:
    """The crops of a batch of images, and the generators of all further random numbers of each image."""

    boxes: NDArray[np.int64]  # B×4
    flip: NDArray[np.bool_]  # B
    draws: Draws


@dataclass(frozen=True)
class CropBatch:
    """Crops with their labels."""

    images: Tensor  # B×C×S×S, normalized
    labels: Tensor  # B
    path_scales: Tensor | None  # factors of drop path, see `mixing.drop_path_scales`

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the batch."""
        return [self.images, self.labels] if self.path_scales is None else [self.images, self.labels, self.path_scales]


Transform = Callable[[Tensor, Draws], tuple[Tensor, Tensor | None]]  # crops in [0, 1] -> normalized, and path scales


class TrainingCrops:
    """Batches of the train split; `batch_size` is that of all processes.

    With `pairs` each process gets an even number of images.
    """

    def __init__(
        self,
        weights: Weights,
        labeled: LabeledImages,
        settings: ClassificationSettings,
        device: torch.device,
        size: int,
        batch_size: int,
        min_crop: float,
        pairs: bool = False,
    ) -> None:
        self.split, self.classes, self.seed = labeled.train, labeled.classes, settings.seed
        self.device, self.size, self.min_crop = device, size, min_crop
        self.batch_size = fit_batch_size(batch_size, len(self.split.labels), (1 + pairs) * distributed.world_size())
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
        """Refuse a split in which no image of some class can be read; call it once every image has been read."""
        unreadable = np.fromiter(self.feed.unreadable, np.int64)
        check_classes(self.split, np.delete(self.split.labels, unreadable), self.classes)
        for path, reason in list(self.unreadable.items())[:5] if distributed.is_main() else ():
            print(printable(f"skipped {path}: {reason}"), file=sys.stderr)

    def check_if_streamed(self) -> None:
        """Check the split after its first epoch, unless that was done when it was cached."""
        if self.feed.store is None:
            self.check()

    def num_readable(self) -> int:
        """Return the number of images that no process has failed to read so far."""
        return len(self.split.labels) - self.feed.num_unreadable()

    def _order(self, start: int, end: int, micro_batch_size: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the epoch and the image indices of this process's micro-batches in steps `start` to `end` - 1."""
        keys, local_size = self.split.source.keys, self.batch_size // distributed.world_size()
        for step in range(start, end):
            epoch, number = divmod(step, self.steps_per_epoch)
            if number == 0 or step == start:
                order = epoch_order(self.seed, epoch, keys)
            first = number * self.batch_size + distributed.rank() * local_size
            for begin in range(first, first + local_size, micro_batch_size):
                yield epoch, order[begin : begin + micro_batch_size]

    def _plan(self, epoch: int, keys: Keys, sizes: NDArray[np.int64]) -> CropPlan:
        draws = Draws(self.seed, epoch, keys)
        boxes = crop_boxes(draws, "train", 1, sizes, (self.min_crop, 1.0), ASPECT)[:, 0]
        return CropPlan(boxes, draws.chance("train flip", 0.5, 1)[:, 0], draws)

    def batches(self, start: int, end: int, micro_batch_size: int, transform: Transform) -> Prefetcher[CropBatch]:
        """Return an iterator, to be closed, over this process's micro-batches of steps `start` to `end` - 1.

        An unreadable image is replaced by the next readable one, with the label of that one.
        """

        def make_batch(batch: Batch[CropPlan]) -> CropBatch:
            plan = batch.plan
            crops = crop(batch.packed.to(self.device), plan.boxes, plan.flip, self.size)
            images, path_scales = transform(crops, plan.draws)
            labels = send(self.split.labels[self.feed.shown(batch.indices)], self.device)
            return CropBatch(images, labels, path_scales)

        return Prefetcher(
            self.feed.batches(self._order(start, end, micro_batch_size), self._plan), make_batch, self.device
        )


def fit_batch_size(batch_size: int, num_images: int, unit: int) -> int:
    """Return the batch size, or of fewer images the largest multiple of `unit`."""
    if batch_size % unit:
        raise UserError(f"batch_size={batch_size} does not divide by {unit}; choose one that does")
    if num_images < unit:
        raise UserError(f"{num_images} images for training are too few; {unit} at least are needed")
    return batch_size if num_images >= batch_size else num_images // unit * unit
