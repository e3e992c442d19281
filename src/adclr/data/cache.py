"""The cache of decoded images: a collection that fits is decoded once, by the CPU, into host or GPU memory.

Pixels of the GPU's decoder, for files that are not cached, differ by 1/255 in the mean where colors are subsampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from adclr.config.parsing import UserError
from adclr.data.decode import Pixels
from adclr.data.packed import Packed, pack
from adclr.system.machine import GIB
from adclr.system.progress import ProgressLine
from adclr.system.threads import ThreadPool, load_in_order, wait_for

Mode = Literal["auto", "off", "ram", "gpu"]
Read = Callable[[int], Pixels | None]  # the pixels of an item, None if it cannot be read
Parts = Iterable[NDArray[np.int64]]  # indices that are read one after the other
SAMPLE = 48  # images from which the size of all is estimated
MARGIN = 1.5  # times the estimate, before the collection counts as too large
HOST_SHARE, GPU_SHARE = 0.5, 0.25  # of the free memory that `auto` uses
# Images that threads pack before they are stored, since each part needs Python's lock; fewer where these would be more
# bytes than this.
PART_IMAGES, PART_BYTES = 32, 2**25


@dataclass(frozen=True)
class FreeMemory:
    """Free memory in bytes."""

    host: float
    gpu: float  # 0 without one


class Store:
    """All images of a collection, decoded and packed."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self.on_gpu = packed.bytes.device.type == "cuda"

    def select(self, indices: NDArray[np.int64]) -> Packed:
        """Return a batch without a copy: the same bytes, other offsets."""
        whole = self.packed
        return Packed(whole.bytes, whole.offsets[indices], whole.sizes[indices], whole.num_channels)

    def image(self, index: int) -> Pixels:
        """Return the pixels of an image in host memory."""
        whole, (height, width) = self.packed, self.packed.sizes[index]
        start, shape = int(whole.offsets[index]), (whole.num_channels, int(height), int(width))
        pixels: Pixels = whole.bytes[start : start + int(np.prod(shape))].numpy().reshape(shape)
        return pixels

    @property
    def gib(self) -> float:
        """Return the size of all images in GiB."""
        return self.packed.bytes.numel() / GIB


def estimate_bytes(
    read: Read, count: int, pool: ThreadPool, ahead: Callable[[Parts], Parts] = lambda parts: parts
) -> float:
    """Estimate the bytes of a decoded collection from a few of its images."""
    chosen = np.linspace(0, count - 1, min(SAMPLE, count)).astype(np.int64)
    futures = [pool.submit(read, int(i)) for part in ahead([chosen]) for i in part]
    sizes = [pixels.size for pixels in (wait_for(future, pool) for future in futures) if pixels is not None]
    return count * float(np.mean(sizes)) if sizes else 0.0


@dataclass(frozen=True)
class Decoded:
    """All images of a collection in host memory, and where they are to be kept."""

    packed: Packed
    location: Literal["ram", "gpu"]

    def place(self, device: torch.device) -> Store:
        """Return the cache, on the device if it is to be there."""
        return Store(self.packed.to(device) if self.location == "gpu" else self.packed)


def decode_all(
    mode: Mode,
    read: Read,
    count: int,
    num_workers: int,
    free: FreeMemory,
    device: torch.device,
    show: bool = True,
    reading: Callable[[], str] = lambda: "the images",
    ahead: Callable[[Parts], Parts] = lambda parts: parts,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Decoded | None:
    """Decode a collection for the cache that `data.cache` asks for; None for none, and after it was stopped.

    `reading` returns what is being read at the moment, for a message; `ahead` announces parts to a store.
    """
    if mode == "gpu" and device.type != "cuda":
        raise UserError("data.cache=gpu was asked for but the run is not on a GPU; set data.cache=ram or auto")
    if mode == "off":
        return None
    with ThreadPool(max(1, num_workers), "cache") as pool:
        size = estimate_bytes(read, count, pool, ahead)
        location = (
            choose_location(mode, size, free) if size else None
        )  # if nothing can be read, the first batch says so
    if location is None:
        return None
    capacity = MARGIN * size + 2**26 if mode == "auto" else free.host
    part = int(np.clip(PART_BYTES * count // size, 1, PART_IMAGES))
    packed = _fill(read, count, part, max(1, num_workers), min(free.host, capacity), show, reading, ahead, is_stopped)
    if packed is None:
        if mode == "auto" or is_stopped():
            return None
        raise UserError(f"the images do not fit into memory as data.cache={mode} wants; set data.cache=auto")
    return Decoded(packed, location)


def choose_location(mode: str, size: float, free: FreeMemory) -> Literal["ram", "gpu"] | None:
    """Return where a collection of so many bytes is cached; None: nowhere."""
    if mode == "auto":
        if free.gpu and MARGIN * size <= min(GPU_SHARE * free.gpu, free.host):
            return "gpu"
        return "ram" if MARGIN * size <= HOST_SHARE * free.host else None
    largest = min(free.gpu, free.host) if mode == "gpu" else free.host
    if size > largest:
        raise UserError(
            f"data.cache={mode} needs about {size / GIB:.1f} GiB and {largest / GIB:.1f} are free; "
            "set data.max_side to shrink the images, or data.cache=auto"
        )
    return "gpu" if mode == "gpu" else "ram"


def _fill(
    read: Read,
    count: int,
    part: int,
    num_workers: int,
    capacity: float,
    show: bool,
    reading: Callable[[], str],
    ahead: Callable[[Parts], Parts],
    is_stopped: Callable[[], bool],
) -> Packed | None:
    """Decode all images, `part` at a time; None if they exceed `capacity` bytes, or once it is stopped.

    An unreadable image gets the offset of the next readable one.
    """
    buffer = np.empty(int(capacity), np.uint8)  # the system allocates pages only as they are written
    offsets, sizes = np.full(count, -1, np.int64), np.zeros((count, 2), np.int64)
    used = channels = 0
    parts = (np.arange(first, min(first + part, count)) for first in range(0, count, part))
    decoded = load_in_order(
        ahead(parts), lambda indices: indices, read, _pack_readable, reading, num_workers, ahead=num_workers
    )
    with closing(decoded), ProgressLine("decoding into memory", count, show=show) as line:
        for number, (readable, packed) in enumerate(decoded, 1):
            line.move(min(number * part, count))
            if is_stopped():
                return None
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


def _pack_readable(indices: NDArray[np.int64], items: list[Pixels | None]) -> tuple[NDArray[np.int64], Packed | None]:
    """Return the indices of readable images, and these, packed."""
    images = [item for item in items if item is not None]
    return indices[[item is not None for item in items]], pack(images) if images else None
