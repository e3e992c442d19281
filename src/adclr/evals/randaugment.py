"""RandAugment for a batch, on the device: two operations for each image, each with a strength of its own.

timm's rand-m9-mstd0.5-inc1, with which DeiT, BEiT, MAE and iBOT fine-tune: fifteen operations, each chosen one applied
with probability 1/2, strengths (0 to 10) normal around 9. Images are n×3×S×S float32 in [0, 1]. The operations of an
image are drawn on the host from its key, without waiting for the device, and do not depend on the rest of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from adclr.data.augment.photometric import brightness, contrast, saturation
from adclr.data.random_draws import Draws
from adclr.system.devices import send

Floats = NDArray[np.float64]
NUM_LAYERS, PROBABILITY = 2, 0.5  # operations of an image; of applying each
DEVIATION, MAX_LEVEL = 0.5, 10.0  # of strengths


def autocontrast(x: Tensor, _: Tensor) -> Tensor:
    """Stretch the values of each channel to [0, 1]."""
    from torchvision.transforms.v2 import functional

    stretched: Tensor = functional.autocontrast(x)
    return stretched


def equalize(x: Tensor, _: Tensor) -> Tensor:
    """Equalize the histogram of each channel."""
    from torchvision.transforms.v2 import functional

    equalized: Tensor = functional.equalize(x)
    return equalized


def invert(x: Tensor, _: Tensor) -> Tensor:
    """Invert all values."""
    return 1 - x


def posterize(x: Tensor, bits: Tensor) -> Tensor:
    """Keep the upper bits of each value."""
    step = 2.0 ** (8 - bits)
    return (x * 255).round().div(step).floor() * step / 255


def solarize(x: Tensor, threshold: Tensor) -> Tensor:
    """Invert values of at least the threshold, of 255."""
    return torch.where((x * 255).round() >= threshold, 1 - x, x)


def solarize_add(x: Tensor, amount: Tensor) -> Tensor:
    """Add an amount, of 255, to the values in the darker half."""
    return torch.where((x * 255).round() < 128, (x + amount / 255).clamp(max=1), x)


def sharpness(x: Tensor, factor: Tensor) -> Tensor:
    """Extrapolate from, or interpolate towards, the image smoothed by a 3×3 kernel; the border stays."""
    kernel = torch.ones(3, 3, device=x.device)
    kernel[1, 1] = 5
    smoothed = x.clone()
    channels = x.shape[1]
    smoothed[:, :, 1:-1, 1:-1] = F.conv2d(x, (kernel / 13).expand(channels, 1, 3, 3), groups=channels)
    return (smoothed + factor * (x - smoothed)).clamp(0, 1)


POINTWISE: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    autocontrast,
    equalize,
    invert,
    posterize,
    solarize,
    solarize_add,
    saturation,
    contrast,
    brightness,
    sharpness,
)
GEOMETRIC = ("rotate", "shear_x", "shear_y", "move_x", "move_y")
NUM_OPERATIONS = len(POINTWISE) + len(GEOMETRIC)


def strengths(operation: Callable[[Tensor, Tensor], Tensor], level: Floats, sign: Floats) -> Floats:
    """Return the argument of a pointwise operation for levels of 0 to 10."""
    share = level / MAX_LEVEL
    values: Floats = np.maximum(0.1, 1 + sign * share * 0.9)
    if operation is posterize:
        values = np.maximum(1, 4 - np.floor(share * 4))
    elif operation is solarize:
        values = 256 - np.minimum(256, np.floor(share * 256))
    elif operation is solarize_add:
        values = np.minimum(128, np.floor(share * 110))
    return values


def matrices(kind: NDArray[np.int64], level: Floats, sign: Floats) -> Floats:
    """Return the affine maps n×2×3 from an output pixel (x, y, 1) to its source, of 1; `kind` indexes GEOMETRIC."""
    matrix = np.tile(np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), (len(kind), 1, 1))
    share = sign * level / MAX_LEVEL
    angle = np.where(kind == 0, -np.radians(30 * share), 0.0)
    matrix[:, 0, 0] = matrix[:, 1, 1] = np.cos(angle)
    matrix[:, 0, 1] = np.where(kind == 1, 0.3 * share, np.sin(angle))
    matrix[:, 1, 0] = np.where(kind == 2, 0.3 * share, -np.sin(angle))
    rotated = kind == 0  # about the center; a shear leaves the upper left corner in place
    for row in (0, 1):
        matrix[rotated, row, 2] = 0.5 - 0.5 * matrix[rotated, row, :2].sum(axis=1)
        matrix[kind == 3 + row, row, 2] = 0.45 * share[kind == 3 + row]
    return matrix


def warp(x: Tensor, matrix: Tensor, fill: Tensor) -> Tensor:
    """Apply affine maps by bicubic sampling; pixels outside the image are `fill`, C×1×1."""
    theta = matrix.clone()  # for torch's coordinates, from -1 to 1
    theta[:, :, 2] = matrix[:, :, :2].sum(dim=2) + 2 * matrix[:, :, 2] - 1
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return (F.grid_sample(x - fill, grid, mode="bicubic", align_corners=False) + fill).clamp(0, 1)


def randaugment(x: Tensor, draws: Draws, magnitude: float, fill: tuple[float, ...]) -> Tensor:
    """Augment images in place and return them; `fill` is the color outside of a moved image."""
    chosen = np.floor(draws.uniform("ra operation", NUM_LAYERS) * NUM_OPERATIONS).astype(np.int64)
    applied = draws.chance("ra chance", PROBABILITY, NUM_LAYERS)
    u = draws.uniform("ra level", NUM_LAYERS, 2)
    normal = np.sqrt(-2 * np.log1p(-u[..., 0])) * np.cos(2 * math.pi * u[..., 1])
    level = np.clip(magnitude + DEVIATION * normal, 0, MAX_LEVEL)
    sign = np.where(draws.chance("ra sign", 0.5, NUM_LAYERS), 1.0, -1.0)
    fill_color = send(np.array(fill, np.float32).reshape(-1, 1, 1), x.device)
    for layer in range(NUM_LAYERS):
        operations, levels, signs = (array[:, layer] for array in (np.where(applied, chosen, -1), level, sign))
        for number, operation in enumerate(POINTWISE):
            rows = np.flatnonzero(operations == number)
            if len(rows):
                values = strengths(operation, levels[rows], signs[rows]).astype(np.float32).reshape(-1, 1, 1, 1)
                index = send(rows, x.device)
                x[index] = operation(x[index], send(values, x.device))
        rows = np.flatnonzero(operations >= len(POINTWISE))
        if len(rows):
            matrix = matrices(operations[rows] - len(POINTWISE), levels[rows], signs[rows]).astype(np.float32)
            index = send(rows, x.device)
            x[index] = warp(x[index], send(matrix, x.device), fill_color)
    return x
