"""J and F of DAVIS: how well a region is covered, and how well its contour is met, of masks n×height×width."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

TOLERANCE = 0.008  # of the diagonal, by which a contour may be off


def region(predicted: Tensor, true: Tensor) -> Tensor:
    """J: intersection over union of each pair, 1 where both are empty."""
    both = (predicted & true).sum(dim=(1, 2)).double()
    either = (predicted | true).sum(dim=(1, 2)).double()
    return torch.where(either > 0, both / either.clamp(min=1), 1.0)


def contour(predicted: Tensor, true: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """F: harmonic mean of how much of the predicted contour is near the true one, and the other way round."""
    height, width = true.shape[1:]
    radius = math.ceil(tolerance * math.hypot(height, width)) if tolerance < 1 else int(tolerance)
    lines = boundary(predicted), boundary(true)
    near = thickened(lines[0], radius), thickened(lines[1], radius)
    counts = [line.sum(dim=(1, 2)).double() for line in lines]
    met = [(line & other).sum(dim=(1, 2)).double() for line, other in ((lines[0], near[1]), (lines[1], near[0]))]
    precision, recall = (m / c.clamp(min=1) for m, c in zip(met, counts, strict=True))
    said, there = counts[0] > 0, counts[1] > 0
    precision = torch.where(said, precision, 1.0)  # of nothing, nothing is wrong
    recall = torch.where(there, recall, 1.0)
    total = precision + recall
    return torch.where(total > 0, 2 * precision * recall / total.clamp(min=1e-12), 0.0)


def boundary(mask: Tensor) -> Tensor:
    """Pixels that differ from the one right, below, or right below of them."""
    wide = F.pad(mask.float().unsqueeze(1), (0, 1, 0, 1), mode="replicate").squeeze(1) > 0.5
    return (mask ^ wide[:, :-1, 1:]) | (mask ^ wide[:, 1:, :-1]) | (mask ^ wide[:, 1:, 1:])


def thickened(lines: Tensor, radius: int) -> Tensor:
    """All pixels at most `radius` away from one of the lines."""
    axis = torch.arange(-radius, radius + 1, device=lines.device)
    disc = (axis[:, None] ** 2 + axis**2 <= radius**2).float()
    return F.conv2d(lines.float().unsqueeze(1), disc[None, None], padding=radius).squeeze(1) > 0.5
