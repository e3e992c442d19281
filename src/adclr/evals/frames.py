"""Whole images in batches of one size, with labels or without, as dense evaluations test on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adclr.features.reader import ImageReader
from adclr.system import distributed

MAX_SCORES = 2**28  # enlarged scores held at once (1 GiB)


@dataclass(frozen=True)
class Frames:
    """Images of one size, with labels of their pixels or without."""

    indices: list[int]  # in the source
    pixels: Tensor  # n×channels×height×width uint8; the last channel of labeled pixels is the label

    @property
    def images(self) -> Tensor:
        """Return the channels before the label."""
        return self.pixels[:, :-1]

    @property
    def labels(self) -> Tensor:
        """Return the last channel."""
        return self.pixels[:, -1]

    @property
    def size(self) -> tuple[int, int]:
        """Return height and width."""
        return self.pixels.shape[-2], self.pixels.shape[-1]


def read_frames(reader: ImageReader, batch_size: int, name: str, show: bool = True) -> Iterator[Frames]:
    """Yield the images of a reader in batches of one size; in each of several processes only its part."""
    indices = distributed.local_range(len(reader.source))
    for group in reader.batches_by_size(indices, batch_size, name, show and distributed.is_main()):
        yield Frames(group.indices.tolist(), group.pixels)
    if show:
        reader.print_skipped()


def fit_size(size: tuple[int, int], side: int, unit: int, most: float = 4.0) -> tuple[int, int]:
    """Return the size whose shorter side is about `side` and the longer at most `most` times that, in whole units."""
    scale = min(side / min(size), most * side / max(size))
    height, width = (unit * max(1, round(n * scale / unit)) for n in size)
    return height, width


def resize_images(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return n×C×height×width uint8 images as float32 in [0, 1], resized: bilinear, antialiased when they shrink."""
    pixels = images.float() / 255
    if images.shape[-2:] == size:
        return pixels
    return F.interpolate(pixels, size=size, mode="bilinear", antialias=True)


def most_likely_class(scores: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the class of the largest enlarged score, n×K×h×w -> n×height×width; a few classes at a time."""
    batch, num_classes = scores.shape[:2]
    at_once = max(1, MAX_SCORES // (batch * size[0] * size[1]))
    best = classes = None
    for first in range(0, num_classes, at_once):
        enlarged = F.interpolate(scores[:, first : first + at_once].float(), size=size, mode="bilinear")
        top, index = enlarged.max(dim=1)
        if best is None or classes is None:
            best, classes = top, index
        else:
            classes = torch.where(top > best, index + first, classes)
            best = torch.maximum(best, top)
    assert classes is not None
    return classes
