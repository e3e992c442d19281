"""Features of labeled images as evaluations compute them: resized, center-cropped, normalized, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adclr.config.parsing import UserError
from adclr.data.sets.classes import Split
from adclr.data.sources import Source
from adclr.features.reader import ImageBatch, ImageReader, center_crop, normalizer, split_batches
from adclr.system import distributed
from adclr.system.machine import host_memory
from adclr.system.progress import track
from adclr.weights.backbone import Weights

CACHE_SHARE = 0.25  # of the free memory, for images that are read more than once


@dataclass(frozen=True)
class Features:
    """Features of the readable images of a source."""

    values: Tensor  # n×D float32, on the CPU
    indices: NDArray[np.int64]  # of the readable images, in the source
    unreadable: dict[str, str]  # path -> reason


class CenterCrops:
    """The center crops of a source, in batches; `shared`: in each of several processes only its part of them.

    With `cache` they stay in memory after the first pass, if they fit.
    """

    def __init__(
        self,
        weights: Weights,
        source: Source,
        device: torch.device,
        batch_size: int = 256,
        num_workers: int | None = None,
        size: tuple[int, int] | None = None,
        shared: bool = False,
        cache: bool = False,
    ) -> None:
        self.source, self.device, self.normalize = source, device, normalizer(weights, device)
        self.shared = shared and distributed.world_size() > 1
        indices = distributed.local_range(len(source)) if self.shared else range(len(source))
        self.order = split_batches(np.asarray(indices, np.int64), batch_size)
        self.num_images = len(indices)
        height, width = size or weights.vit.input_size
        num_bytes = len(indices) * weights.vit.num_channels * height * width
        self.cache = cache and num_bytes <= CACHE_SHARE * host_memory() / distributed.local_world_size()
        self.cached: list[ImageBatch] | None = None
        reading_device = torch.device("cpu") if self.cache else device
        framing = center_crop((height, width))
        self.reader = ImageReader(source, weights.decoder, framing, reading_device, num_workers)

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.order)

    def __iter__(self) -> Iterator[ImageBatch]:
        if self.cached is not None:
            yield from self.cached
            return
        batches = []
        for batch in self.reader.batches(self.order):
            if self.cache:
                batches.append(batch)
            yield batch
        self.cached = batches if self.cache else None


@torch.no_grad()
def compute_features(
    crops: CenterCrops, pool: Callable[[Tensor], Tensor], name: str = "features", show: bool = True
) -> Features:
    """Return `pool(images)` of every readable image, in float32; of all processes together if they share the source."""
    normalize, source = crops.normalize, crops.source
    values, indices = [], []
    for batch in track(crops, name, len(crops), show):
        for group in batch.groups:
            values.append(pool(normalize(group.pixels.to(crops.device))).float().cpu())
            indices.append(torch.from_numpy(group.indices))
    if not values:
        part = f"the {crops.num_images} images of {source.root} that this process reads" if crops.shared else None
        raise UserError(f"none of {part or f'the {len(source)} images of {source.root}'} can be read")
    if show:
        crops.reader.print_skipped()
    features, order = torch.cat(values), torch.cat(indices)
    if crops.shared:
        features, order = distributed.gather(features), distributed.gather(order)
    unreadable = {source.paths[index]: reason for index, reason in crops.reader.unreadable.items()}
    return Features(features, order.numpy(), unreadable)


def extract_features(
    weights: Weights,
    source: Source,
    pool: Callable[[Tensor], Tensor],
    device: torch.device,
    batch_size: int = 256,
    num_workers: int | None = None,
    name: str = "features",
    show: bool = True,
    size: tuple[int, int] | None = None,
    shared: bool = False,
) -> Features:
    """Return `pool(images)` of the center crop of every readable image of a source, read once."""
    return compute_features(
        CenterCrops(weights, source, device, batch_size, num_workers, size, shared), pool, name, show
    )


def readable_labels(features: Features, split: Split, classes: list[str], max_unreadable: float) -> Tensor:
    """Return the labels of the readable images; refuse to score a split of which too many images are unreadable."""
    _check_readable(split.source, len(split.labels) - len(features.indices), max_unreadable)
    labels = split.labels[features.indices]
    check_classes(split, labels, classes)
    return torch.from_numpy(labels)


def count_unreadable(reader: ImageReader, max_unreadable: float) -> int:
    """Return how many images no process could read; refuse to score a source of which they are too many."""
    count = int(distributed.all_reduce_sum(torch.tensor([len(reader.unreadable)], device=reader.device)).item())
    _check_readable(reader.source, count, max_unreadable)
    return count


def _check_readable(source: Source, num_unreadable: int, max_unreadable: float) -> None:
    """Refuse a source of which more than a share of the images is unreadable."""
    if num_unreadable > max_unreadable * len(source):
        raise UserError(
            f"{num_unreadable} of {len(source)} images of {source.root} cannot be read; "
            "fix them or raise max_unreadable"
        )


def check_classes(split: Split, readable: NDArray[np.int64], classes: list[str]) -> None:
    """Refuse a split of which a whole class is unreadable; `readable` are the labels of the readable images."""
    empty = np.setdiff1d(split.labels, readable)
    if len(empty):
        raise UserError(f"no image of class {classes[empty[0]]} in {split.source.root} can be read; fix or remove it")
