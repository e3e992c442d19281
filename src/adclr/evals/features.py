"""Images -> features, the way evaluations see them: resized, centre-cropped, normalised, in order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adclr.config import UserError
from adclr.decode import Pixels
from adclr.images import Images, centre, resize
from adclr.progress import track
from adclr.sources import Source
from adclr.weights import Weights


@dataclass(frozen=True)
class Features:
    values: Tensor  # n×D float32, on the CPU
    kept: NDArray[np.int64]  # which images of the source they are of: all but the unreadable
    unreadable: dict[str, str]  # path -> reason


def prepare(image: Pixels, size: tuple[int, int]) -> Pixels:
    """Shorter side to 256/224 of the input size by bicubic resampling, then the centre: C×height×width."""
    return resize(image, centre(size)(*image.shape[1:]))


@torch.no_grad()
def extract(
    weights: Weights,
    source: Source,
    pool: Callable[[Tensor], Tensor],
    device: torch.device,
    batch_size: int = 256,
    num_workers: int | None = None,
    name: str = "features",
    show: bool = True,
) -> Features:
    """`pool(images)` for every readable image, float32 throughout."""
    size = weights.vit.input_size
    mean = torch.tensor(weights.mean, device=device).view(-1, 1, 1)
    std = torch.tensor(weights.std, device=device).view(-1, 1, 1)
    values, kept = [], []
    unreadable: dict[str, str] = {}
    # decoded by the CPU, so that a score is the same on every machine
    images = Images(source, weights.decoder, centre(size), device, num_workers, gpu_decoding=False)
    order = [np.arange(i, min(i + batch_size, len(source))) for i in range(0, len(source), batch_size)]
    for batch in track(images.batches(order), name, len(order), show):
        unreadable |= {source.paths[index]: reason for index, reason in batch.unreadable.items()}
        for group in batch.groups:  # all are of one size, so there is one, or none
            found = pool((group.pixels.float() / 255 - mean) / std).float().cpu()
            first = np.argsort(group.indices)
            values.append(found[torch.from_numpy(first)])
            kept += group.indices[first].tolist()
    if not values:
        raise UserError(f"none of the {len(source)} images of {source.root} can be read")
    for path, reason in list(unreadable.items())[:5] if show else ():
        print(f"skipped {path}: {reason}", file=sys.stderr)
    return Features(torch.cat(values), np.array(kept, np.int64), unreadable)
