"""RandAugment for a batch, on the device: each image gets two operations of its own, each with its own strength.

What timm calls rand-m9-mstd0.5-inc1, which DeiT, BEiT, MAE and iBOT fine-tune with: fifteen operations, each chosen one
happens with probability 1/2, strengths (0 to 10) are normal around 9. Images are n×3×S×S float32 in [0, 1]. Which image
gets what is drawn on the host from its key, so that nothing waits for the device and nothing hangs on the batch.
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
from adclr.data.draws import Draws
from adclr.system.devices import send

Floats = NDArray[np.float64]
LAYERS, CHANCE, SPREAD, TOP = 2, 0.5, 0.5, 10.0  # operations of an image; of each; deviation and limit of strengths


def autocontrast(x: Tensor, _: Tensor) -> Tensor:
    from torchvision.transforms.v2 import functional

    stretched: Tensor = functional.autocontrast(x)
    return stretched


def equalise(x: Tensor, _: Tensor) -> Tensor:
    from torchvision.transforms.v2 import functional

    flat: Tensor = functional.equalize(x)
    return flat


def invert(x: Tensor, _: Tensor) -> Tensor:
    return 1 - x


def posterise(x: Tensor, bits: Tensor) -> Tensor:
    """Keeps the upper bits."""
    step = 2.0 ** (8 - bits)
    return (x * 255).round().div(step).floor() * step / 255


def solarise(x: Tensor, threshold: Tensor) -> Tensor:
    """Inverts what is at least as bright as the threshold, of 255."""
    return torch.where((x * 255).round() >= threshold, 1 - x, x)


def solarise_add(x: Tensor, amount: Tensor) -> Tensor:
    """Makes the darker half brighter, by an amount of 255."""
    return torch.where((x * 255).round() < 128, (x + amount / 255).clamp(max=1), x)


def sharpness(x: Tensor, factor: Tensor) -> Tensor:
    """Away from, or towards, the image smoothed by a 3×3 kernel; the border stays."""
    kernel = torch.ones(3, 3, device=x.device)
    kernel[1, 1] = 5
    smooth = x.clone()
    channels = x.shape[1]
    smooth[:, :, 1:-1, 1:-1] = F.conv2d(x, (kernel / 13).expand(channels, 1, 3, 3), groups=channels)
    return (smooth + factor * (x - smooth)).clamp(0, 1)


POINTWISE: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    autocontrast,
    equalise,
    invert,
    posterise,
    solarise,
    solarise_add,
    saturation,
    contrast,
    brightness,
    sharpness,
)
GEOMETRIC = ("rotate", "shear_x", "shear_y", "move_x", "move_y")
NUM = len(POINTWISE) + len(GEOMETRIC)


def strengths(kind: Callable[[Tensor, Tensor], Tensor], level: Floats, sign: Floats) -> Floats:
    """What a pointwise operation is told at a level of 0 to 10."""
    part = level / TOP
    told: Floats = np.maximum(0.1, 1 + sign * part * 0.9)
    if kind is posterise:
        told = np.maximum(1, 4 - np.floor(part * 4))
    elif kind is solarise:
        told = 256 - np.minimum(256, np.floor(part * 256))
    elif kind is solarise_add:
        told = np.minimum(128, np.floor(part * 110))
    return told


def matrices(kind: NDArray[np.int64], level: Floats, sign: Floats) -> Floats:
    """n×2×3: where, in an image whose sides are 1, the pixel at (x, y, 1) comes from; `kind` is of GEOMETRIC."""
    found = np.tile(np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), (len(kind), 1, 1))
    part = sign * level / TOP
    angle = np.where(kind == 0, -np.radians(30 * part), 0.0)
    found[:, 0, 0] = found[:, 1, 1] = np.cos(angle)
    found[:, 0, 1] = np.where(kind == 1, 0.3 * part, np.sin(angle))
    found[:, 1, 0] = np.where(kind == 2, 0.3 * part, -np.sin(angle))
    turned = kind == 0  # about the centre; a shear leaves the upper left corner where it is
    for row in (0, 1):
        found[turned, row, 2] = 0.5 - 0.5 * found[turned, row, :2].sum(axis=1)
        found[kind == 3 + row, row, 2] = 0.45 * part[kind == 3 + row]
    return found


def warp(x: Tensor, matrix: Tensor, fill: Tensor) -> Tensor:
    """Bicubic, outside of the image `fill`, C×1×1."""
    theta = matrix.clone()  # of the square from -1 to 1 that torch knows
    theta[:, :, 2] = matrix[:, :, :2].sum(dim=2) + 2 * matrix[:, :, 2] - 1
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return (F.grid_sample(x - fill, grid, mode="bicubic", align_corners=False) + fill).clamp(0, 1)


def randaugment(x: Tensor, draws: Draws, magnitude: float, fill: tuple[float, ...]) -> Tensor:
    """Alters x and returns it; `fill` is the colour outside of an image that was moved."""
    chosen = np.floor(draws.uniform("ra operation", LAYERS) * NUM).astype(np.int64)
    happens = draws.chance("ra chance", CHANCE, LAYERS)
    u = draws.uniform("ra level", LAYERS, 2)
    normal = np.sqrt(-2 * np.log1p(-u[..., 0])) * np.cos(2 * math.pi * u[..., 1])
    level = np.clip(magnitude + SPREAD * normal, 0, TOP)
    sign = np.where(draws.chance("ra sign", 0.5, LAYERS), 1.0, -1.0)
    ground = send(np.array(fill, np.float32).reshape(-1, 1, 1), x.device)
    for layer in range(LAYERS):
        which, levels, signs = (array[:, layer] for array in (np.where(happens, chosen, -1), level, sign))
        for number, change in enumerate(POINTWISE):
            rows = np.flatnonzero(which == number)
            if len(rows):
                told = strengths(change, levels[rows], signs[rows]).astype(np.float32).reshape(-1, 1, 1, 1)
                index = send(rows, x.device)
                x[index] = change(x[index], send(told, x.device))
        rows = np.flatnonzero(which >= len(POINTWISE))
        if len(rows):
            matrix = matrices(which[rows] - len(POINTWISE), levels[rows], signs[rows]).astype(np.float32)
            index = send(rows, x.device)
            x[index] = warp(x[index], send(matrix, x.device), ground)
    return x
