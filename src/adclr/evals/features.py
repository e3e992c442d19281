"""Images -> features, the way evaluations see them: resized, centre-cropped, normalised, in order."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adclr.config import UserError
from adclr.decode import Decoder, Pixels, Unreadable
from adclr.images import centre, resize
from adclr.progress import track
from adclr.sources import Source
from adclr.weights import Weights

AHEAD = 4  # batches prepared while the network works


@dataclass(frozen=True)
class Features:
    values: Tensor  # n×D float32, on the CPU
    kept: NDArray[np.int64]  # which images of the source they are of: all but the unreadable
    unreadable: dict[str, str]  # path -> reason


def prepare(image: Pixels, size: tuple[int, int]) -> Pixels:
    """Shorter side to 256/224 of the input size by bicubic resampling, then the centre: C×height×width."""
    return resize(image, centre(size)(*image.shape[1:]))


def prepared(
    source: Source, size: tuple[int, int], batch_size: int, num_workers: int | None, decoder: Decoder
) -> Iterator[list[NDArray[np.uint8] | str]]:
    """Batches of prepared images in the order of the source; the reason stands for an unreadable one."""

    def one(index: int) -> NDArray[np.uint8] | str:
        try:
            return prepare(decoder(source.read(index)), size)
        except (Unreadable, OSError) as error:
            return str(error)

    waiting: deque[list[Future[NDArray[np.uint8] | str]]] = deque()
    pool = ThreadPoolExecutor(num_workers or os.cpu_count() or 1)
    try:
        for start in range(0, len(source), batch_size):
            waiting.append([pool.submit(one, i) for i in range(start, min(start + batch_size, len(source)))])
            if len(waiting) > AHEAD:
                yield [future.result() for future in waiting.popleft()]
        while waiting:
            yield [future.result() for future in waiting.popleft()]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


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
    values, kept, unreadable = [], [], {}
    batches = prepared(source, size, batch_size, num_workers, weights.decoder)
    total = -(-len(source) // batch_size)
    for number, batch in enumerate(track(batches, name, total, show)):
        readable = []
        for index, image in enumerate(batch, number * batch_size):
            if isinstance(image, str):
                unreadable[source.paths[index]] = image
            else:
                readable.append((index, image))
        if not readable:
            continue
        pixels = torch.from_numpy(np.stack([image for _, image in readable])).to(device)
        values.append(pool((pixels.float() / 255 - mean) / std).float().cpu())
        kept += [index for index, _ in readable]
    if not values:
        raise UserError(f"none of the {len(source)} images of {source.root} can be read")
    for path, reason in list(unreadable.items())[:5] if show else ():
        print(f"skipped {path}: {reason}", file=sys.stderr)
    return Features(torch.cat(values), np.array(kept, np.int64), unreadable)
