"""Resampling of position embeddings to grids of other sizes."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# All bicubic: with antialiasing, without, or without and for a grid larger by OFFSET patches, as in DINO's code.
PositionResampling = Literal["antialias", "plain", "offset"]
POSITION_OFFSET = 0.1


@lru_cache(maxsize=128)  # images of any size have many grids, and a matrix is a few MB
def resampling_matrix(
    stored: tuple[int, int], target: tuple[int, int], mode: PositionResampling, device: torch.device
) -> Tensor:
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
