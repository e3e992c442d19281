"""Positions of patches: learned embeddings resampled to another grid, and the rotation of DINOv3.

A rotation turns pairs of numbers of an attention query and key by an angle that grows with the row or the column of the
patch, so that their product depends on where the two patches are to each other. `[CLS]`, registers and query tokens
have no position and are not turned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from adclr.model.blocks import partition_windows
from adclr.model.ops.attention import Group
from adclr.model.ops.rotation import Rotation

PositionEmbedding = Literal["learned", "rotary"]
# All bicubic: with antialiasing, without, or without and for a grid larger by OFFSET patches, as in DINO's code.
PositionResampling = Literal["antialias", "plain", "offset"]
POSITION_OFFSET = 0.1
ROTARY_BASE = (
    100.0  # DINOv3's; the longest period is that of a side of the image times BASE ** (1 - 4 / head width) / 2
)

Grid = tuple[int, int]


@lru_cache(maxsize=128)  # images of any size have many grids, and a matrix is a few MB
def _resampling_matrix(stored: Grid, target: Grid, mode: PositionResampling, device: torch.device) -> Tensor:
    """Return the matrix that resamples a grid: on a GPU the gradient of `F.interpolate` is not deterministic."""
    count = stored[0] * stored[1]
    with torch.no_grad(), torch.inference_mode(False):
        basis = torch.eye(count).view(count, 1, *stored)
        if mode == "offset":
            scale = [(new + POSITION_OFFSET) / old for new, old in zip(target, stored, strict=True)]
            resampled = F.interpolate(basis, scale_factor=scale, mode="bicubic")
        else:
            resampled = F.interpolate(basis, size=target, mode="bicubic", antialias=mode == "antialias")
        return resampled.view(count, -1).T.contiguous().to(device)


def resample_positions(
    stored: Tensor, num_prefix: int, stored_grid: Grid, grid: Grid, mode: PositionResampling
) -> Tensor:
    """Return the positions of `num_prefix` tokens and of a grid of patches, from those stored for another grid."""
    if grid == stored_grid:
        return stored
    prefix, patches = stored[:, :num_prefix], stored[:, num_prefix:]
    matrix = _resampling_matrix(stored_grid, grid, mode, stored.device)
    with torch.autocast(stored.device.type, enabled=False):
        return torch.cat([prefix, matrix.to(stored.dtype) @ patches], dim=1)


# -- rotary positions --


def periods(head_width: int) -> Tensor:
    """Return the head_width/4 periods, in units of half a side of the image."""
    return ROTARY_BASE ** (torch.arange(head_width // 4, dtype=torch.float64) * 4 / head_width)


def _centers(numbers: Tensor) -> Tensor:
    """Return the centers of patches 0, 1, ... along a side that goes from -1 to 1, whatever its length."""
    return 2 * (numbers + 0.5) / (numbers[-1] + 1) - 1


def angles(rows: Tensor, columns: Tensor, head_width: int) -> Tensor:
    """Return N×(head_width/2) angles of the patches in rows and columns 0, 1, ...: half by the row, half by the column.

    The number of rows and columns may be open until a graph runs.
    """
    frequencies = (2 * math.pi / periods(head_width)).to(rows.dtype)
    vertical, horizontal = _centers(rows)[:, None, None] * frequencies, _centers(columns)[None, :, None] * frequencies
    grid = torch.zeros_like(vertical + horizontal)
    return torch.cat([grid + vertical, grid + horizontal], dim=-1).flatten(0, 1)


def rotation_of_groups(
    grids: Sequence[Grid], prefix: int, groups: Sequence[Group], head_width: int, like: Tensor
) -> Rotation:
    """Return the rotation of groups of sequences: `prefix` tokens, the patches of a grid, and queries.

    On the device of `like`, in float64 if that is, else in float32.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    shapes = tuple((grid, prefix, group.tokens - group.image) for grid, group in zip(grids, groups, strict=True))
    return _rotation(shapes, head_width, dtype, like.device)


@lru_cache(maxsize=128)
def _rotation(
    shapes: tuple[tuple[Grid, int, int], ...], head_width: int, dtype: torch.dtype, device: torch.device
) -> Rotation:
    with torch.inference_mode(False):
        tables = []
        for grid, prefix, queries in shapes:
            rows, columns = (torch.arange(count, dtype=torch.float64) for count in grid)
            tables.append(F.pad(angles(rows, columns, head_width), (0, 0, prefix, queries)))
        turned = torch.cat(tables)
        table = torch.stack([turned.cos(), turned.sin()]).to(dtype).to(device)
    return Rotation(table, tuple(len(part) for part in tables))


def rotation_of_windows(whole: Rotation, grid: Grid, side: int) -> Rotation:
    """Return the rotation of `partition_windows` from that of the grid."""
    order, windows = partition_windows(grid, side, 1, whole.table.device)
    return Rotation(whole.table[:, order], tuple(group.sequences * group.tokens for group in windows))
