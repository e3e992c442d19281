"""Logits of whole images: in one piece or by windows that slide over them, at several scales, mirrored too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from adclr.evals.frames import fitting, likeliest, resized

Network = Callable[[Tensor], Tensor]  # images in [0, 1] -> logits at some stride


def starts(length: int, window: int, stride: int) -> list[int]:
    """Where windows begin so that they cover a length; the last is moved back to end where it ends."""
    count = max(0, -(-(length - window) // stride)) + 1
    return [max(0, min(number * stride, length - window)) for number in range(count)]


def whole(network: Network, images: Tensor) -> Tensor:
    """B×C×H×W -> logits B×K×H×W"""
    return F.interpolate(network(images).float(), size=images.shape[-2:], mode="bilinear")


def sliding(network: Network, images: Tensor, window: int, stride: int, at_once: int = 16) -> Tensor:
    """The mean of the logits of all windows a pixel lies in."""
    height, width = images.shape[-2:]
    tall, wide = min(window, height), min(window, width)
    places = [(top, left) for top in starts(height, tall, stride) for left in starts(width, wide, stride)]
    sums: Tensor | None = None
    counts = torch.zeros(height, width, device=images.device)
    together = max(1, at_once // len(images))
    for first in range(0, len(places), together):
        chosen = places[first : first + together]
        pieces = torch.cat([images[..., top : top + tall, left : left + wide] for top, left in chosen])
        for (top, left), found in zip(chosen, torch.split(whole(network, pieces), len(images)), strict=True):
            if sums is None:
                sums = found.new_zeros(len(images), found.shape[1], height, width)
            sums[..., top : top + tall, left : left + wide] += found
            counts[top : top + tall, left : left + wide] += 1
    assert sums is not None
    return sums / counts


def predict(
    network: Network,
    images: Tensor,
    side: int,
    unit: int,
    window: tuple[int, int] | None,
    scales: Sequence[float] = (1.0,),
    mirrored: bool = False,
) -> Tensor:
    """n×C×height×width uint8 -> n×height×width classes.

    Images are resized to a shorter side of `side` times each scale; `window`: side and stride of windows. Of several
    scales, or of an image and its mirror image, the mean of the probabilities decides.
    """
    size = images.shape[-2], images.shape[-1]

    def logits(pixels: Tensor) -> Tensor:
        return whole(network, pixels) if window is None else sliding(network, pixels, *window)

    if len(scales) == 1 and not mirrored:
        return likeliest(logits(resized(images, fitting(size, round(side * scales[0]), unit))), size)
    total: Tensor | None = None
    for scale in scales:
        pixels = resized(images, fitting(size, round(side * scale), unit))
        for seen in (pixels, pixels.flip(-1)) if mirrored else (pixels,):
            found = F.interpolate(logits(seen), size=size, mode="bilinear").softmax(dim=1)
            found = found if seen is pixels else found.flip(-1)
            total = found if total is None else total + found
    assert total is not None
    return total.argmax(dim=1)
