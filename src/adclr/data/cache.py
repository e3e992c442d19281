"""A collection that fits is decoded once, by the CPU, and kept as bytes, in host memory or on the GPU.

Pixels of the GPU's decoder, for files that are not kept, differ by 1/255 in the mean where colours are subsampled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from adclr.config.sections import UserError
from adclr.data.decode import Pixels
from adclr.data.packed import Packed, pack
from adclr.system.progress import Line
from adclr.system.threads import Workers, in_order, result

Mode = Literal["auto", "off", "ram", "gpu"]
Read = Callable[[int], Pixels | None]  # the pixels of an item, None if it cannot be read
SAMPLE = 48  # images from which the size of all is guessed
MARGIN = 1.5  # of the guess, before the collection counts as too large
HOST_SHARE, GPU_SHARE = 0.5, 0.25  # of the free memory that `auto` takes
# Images that threads put together before they are stored, since for each part Python's lock is asked for; fewer where
# so many would be more than these bytes.
TOGETHER, PART = 32, 2**25
GIB = 2**30


@dataclass(frozen=True)
class Room:
    """Bytes that may be filled."""

    host: float
    gpu: float  # 0 without one


class Store:
    """All images end to end, each C×height×width."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self.on_gpu = packed.bytes.device.type == "cuda"

    def select(self, indices: NDArray[np.int64]) -> Packed:
        """A batch without a copy: the same bytes, other places."""
        whole = self.packed
        return Packed(whole.bytes, whole.offsets[indices], whole.sizes[indices], whole.num_channels)

    def image(self, index: int) -> Pixels:
        whole, (height, width) = self.packed, self.packed.sizes[index]
        start, shape = int(whole.offsets[index]), (whole.num_channels, int(height), int(width))
        pixels: Pixels = whole.bytes[start : start + int(np.prod(shape))].numpy().reshape(shape)
        return pixels

    @property
    def gib(self) -> float:
        return self.packed.bytes.numel() / GIB


def guess(read: Read, count: int, pool: Workers) -> float:
    """Bytes of a whole collection, from a few of its images."""
    chosen = np.linspace(0, count - 1, min(SAMPLE, count)).astype(int)
    futures = [pool.submit(read, int(i)) for i in chosen]
    found = [pixels.size for pixels in (result(future, pool) for future in futures) if pixels is not None]
    return count * float(np.mean(found)) if found else 0.0


def make(
    mode: Mode,
    read: Read,
    count: int,
    num_workers: int,
    room: Room,
    device: torch.device,
    show: bool = True,
    reading: Callable[[], str] = lambda: "the images",
) -> Store | None:
    """The store that a setting asks for; None for none. `reading` says, for a person, what is being read just now."""
    if mode == "gpu" and device.type != "cuda":
        raise UserError("data.cache=gpu was asked for but the run is not on a GPU; set data.cache=ram or auto")
    if mode == "off":
        return None
    with Workers(max(1, num_workers), "cache") as pool:
        size = guess(read, count, pool)
        where = place(mode, size, room) if size else None  # nothing can be read: whoever asks first says so
    if where is None:
        return None
    capacity = MARGIN * size + 2**26 if mode == "auto" else room.host
    together = int(np.clip(PART * count // size, 1, TOGETHER))
    packed = _fill(read, count, together, max(1, num_workers), min(room.host, capacity), show, reading)
    if packed is None:
        if mode == "auto":
            return None
        raise UserError(f"the images do not fit into memory as data.cache={mode} wants; set data.cache=auto")
    return Store(packed.to(device) if where == "gpu" else packed)


def place(mode: str, size: float, room: Room) -> Literal["ram", "gpu"] | None:
    """Where a collection of so many bytes is kept; None: nowhere."""
    if mode == "auto":
        if room.gpu and MARGIN * size <= min(GPU_SHARE * room.gpu, room.host):
            return "gpu"
        return "ram" if MARGIN * size <= HOST_SHARE * room.host else None
    largest = min(room.gpu, room.host) if mode == "gpu" else room.host
    if size > largest:
        raise UserError(
            f"data.cache={mode} needs about {size / GIB:.1f} GiB and {largest / GIB:.1f} are free; "
            "set data.max_side to shrink the images, or data.cache=auto"
        )
    return "gpu" if mode == "gpu" else "ram"


def _fill(
    read: Read,
    count: int,
    together: int,
    num_workers: int,
    capacity: float,
    show: bool,
    reading: Callable[[], str],
) -> Packed | None:
    """All images; None if they are more than `capacity`. An unreadable one has the place of the next that is not."""
    buffer = np.empty(int(capacity), np.uint8)  # the system gives pages only as they are written
    offsets, sizes = np.full(count, -1, np.int64), np.zeros((count, 2), np.int64)
    used = channels = 0
    parts = (np.arange(first, min(first + together, count)) for first in range(0, count, together))
    made = in_order(parts, lambda part: part, read, _join, reading, num_workers, ahead=num_workers)
    with closing(made), Line("decoding into memory", count, show=show) as line:
        for number, (readable, packed) in enumerate(made, 1):
            line.move(min(number * together, count))
            if packed is None:
                continue
            end = used + len(packed.bytes)
            if end > len(buffer):
                return None
            buffer[used:end] = packed.bytes.numpy()
            offsets[readable], sizes[readable], channels = used + packed.offsets, packed.sizes, packed.num_channels
            used = end
    readable = np.flatnonzero(offsets >= 0)
    if not len(readable):
        return None
    following = readable[np.searchsorted(readable, np.arange(count)) % len(readable)]
    return Packed(torch.from_numpy(buffer[:used]), offsets[following], sizes[following], channels)


def _join(part: NDArray[np.int64], items: list[Pixels | None]) -> tuple[NDArray[np.int64], Packed | None]:
    """Which can be read, and these, end to end."""
    found = [item for item in items if item is not None]
    return part[[item is not None for item in items]], pack(found) if found else None
