"""Random erasing, mixup, cutmix and label smoothing for fine-tuning; drop path as a function of the image.

Images of a batch are mixed in pairs of neighbors, which are random pairs because the order is random. Each process
mixes its own part of a batch, with the same result as one process would have for the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adclr.data.random_draws import Draws, combine, crop_boxes, key_of
from adclr.system.devices import send

AREA, ASPECT = (0.02, 1 / 3), (0.3, 1 / 0.3)  # of the erased rectangle, as in timm


class Eraser:
    """Fills a random rectangle of some normalized images with noise, pixel by pixel.

    The noise is a window of one canvas that is drawn once; the position of the window depends on the image alone.
    """

    def __init__(self, probability: float, num_channels: int, size: int, seed: int, device: torch.device) -> None:
        self.probability, self.size = probability, size
        generator = torch.Generator().manual_seed(combine(seed, key_of("erasing")) % 2**63)
        self.canvas = torch.randn(num_channels, size, size, generator=generator).to(device)
        self.axis = torch.arange(size, device=device)

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        """Erase in place and return the images."""
        rows = np.flatnonzero(draws.chance("erase", self.probability, 1)[:, 0])
        if not len(rows):
            return x
        sizes = np.full((len(x), 2), self.size)
        boxes = crop_boxes(draws, "erase", 1, sizes, AREA, ASPECT)[rows, 0]
        shift = (draws.uniform("erase noise", 2)[rows] * self.size).astype(np.int64)
        index = send(rows, x.device)
        top, left, height, width, down, right = send(np.concatenate([boxes, shift], axis=1), x.device).T[..., None]
        rows_inside = (self.axis >= top) & (self.axis < top + height)  # n×S
        columns_inside = (self.axis >= left) & (self.axis < left + width)
        noise = self.canvas[:, ((self.axis + down) % self.size)[:, :, None], ((self.axis + right) % self.size)[:, None]]
        erased = (rows_inside[:, :, None] & columns_inside[:, None]).unsqueeze(1)
        x[index] = torch.where(erased, noise.transpose(0, 1), x[index])
        return x


@dataclass(frozen=True)
class Mix:
    """The mixing of each image of a step with its neighbor."""

    share: float  # of the image itself
    box: tuple[int, int, int, int] | None  # top, left, bottom, right of the neighbor's part in cutmix; None: mixup

    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return mixed images and soft labels; the images are changed in place."""
        if self.share == 1:
            return images, targets
        order = torch.arange(len(images), device=images.device)
        neighbor = torch.where(order ^ 1 < len(images), order ^ 1, order)  # the last of an odd number is its own
        if self.box is None:
            images = self.share * images + (1 - self.share) * images[neighbor]
        else:
            top, left, bottom, right = self.box
            images[:, :, top:bottom, left:right] = images[neighbor, :, top:bottom, left:right]
        return images, self.share * targets + (1 - self.share) * targets[neighbor]


def draw_mix(seed: int, step: int, mixup: float, cutmix: float, size: int) -> Mix:
    """Return the mixing of a step; `mixup` and `cutmix` are the parameters of their Beta distributions, 0: never."""
    rng = np.random.default_rng(combine(seed, step, key_of("mixing")))
    cut = bool(cutmix) and (not mixup or rng.random() < 0.5)
    alpha = cutmix if cut else mixup
    if not alpha:
        return Mix(1.0, None)
    share = float(rng.beta(alpha, alpha))
    if not cut:
        return Mix(share, None)
    side = int(size * np.sqrt(1 - share))
    y, x = (int(n) for n in rng.integers(size, size=2))
    top, left, bottom, right = np.clip([y - side // 2, x - side // 2, y + side // 2, x + side // 2], 0, size).tolist()
    return Mix(1 - (bottom - top) * (right - left) / size**2, (top, left, bottom, right))


def smooth_labels(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Return B×K targets: `smoothing` is distributed evenly over all classes, the label included."""
    return F.one_hot(labels, num_classes) * (1 - smoothing) + smoothing / num_classes


def drop_path_scales(draws: Draws, depth: int, rate: float, device: torch.device) -> Tensor | None:
    """Return the factors of the two branches of each block, depth×2×B: 0, or 1 / (1 - rate of the block)."""
    if not rate:
        return None
    rates = np.linspace(0, rate, depth)[:, None]
    retained = draws.uniform("drop path", depth, 2) >= rates
    return send((retained / (1 - rates)).transpose(1, 2, 0).astype(np.float32), device)
