"""Batches ahead of the step: files are read and decoded by threads (decoding leaves Python's lock), in a fixed order.

Where there is a decoder on the GPU, threads only read what it takes, and it decodes a batch of them at once.

An unreadable image is listed once and its place is filled by a fixed rule: the pixels of the next readable image in the
order of paths, with the draws of the place's own key. So neither threads nor luck decide what a batch holds.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from adclr.augment import Packed, pack
from adclr.cache import Store
from adclr.config import UserError
from adclr.decode import Decoder, Pixels, Unreadable
from adclr.draws import Words
from adclr.nvjpeg import Encoded, GpuDecoder
from adclr.sources import Source
from adclr.views import Plan
from adclr.workers import Stuck, Workers, result

# Batches decoded ahead: enough that threads never wait for a step to end, few enough that memory stays small.
AHEAD = 3
# Images a thread takes at a time. 16 threads read 3 600 files/s one by one; in eights, and with fewer system calls for
# each, 17 000 and 30 000 (two other runs on the same kind of machine).
TOGETHER = 8
# The thread that launches a step's thousands of operations can lose Python's lock to a decoder at each. Asking for
# it back after 0.5 ms instead of 5 gave 553 images/s instead of 492 (ViT-S/16, batch 128, H200, 16 threads).
SWITCH_SECONDS = 5e-4


Item = TypeVar("Item", Pixels, Pixels | Encoded)
Planner = Callable[[int, Words, NDArray[np.int64]], Plan]  # (epoch, keys, sizes) -> what is made of the batch


@dataclass(frozen=True)
class Batch:
    packed: Packed
    plan: Plan


class Feed:
    """Reads images of a source; remembers which cannot be used."""

    def __init__(
        self,
        source: Source,
        num_workers: int,
        decoder: Decoder,
        max_unreadable: float = 1.0,
        pin: bool = False,
        on_unreadable: Callable[[str, str], None] = lambda path, reason: None,
        gpu_decoder: GpuDecoder | None = None,
    ) -> None:
        self.source, self.num_workers, self.decoder, self.pin = source, num_workers, decoder, pin
        self.max_unreadable, self.on_unreadable = max_unreadable, on_unreadable
        self.gpu_decoder = gpu_decoder
        self.store: Store | None = None  # what has been decoded once and for all
        self.unreadable: set[int] = set()
        self._lock = Lock()
        self._reading: dict[int, int] = {}  # by thread
        self._gpu = torch.cuda.current_device() if pin else None

    def read(self, index: int) -> Pixels | None:
        """The pixels of an image; one that cannot be read is listed, and None."""
        return self._read(index, self.decoder)

    def _read(self, index: int, decode: Callable[[bytes], Item]) -> Item | None:
        if index in self.unreadable:
            return None
        thread = get_ident()
        self._reading[thread] = index
        try:
            return decode(self.source.read(index))
        except (Unreadable, OSError) as error:
            self._list(index, str(error))
            return None
        finally:
            self._reading.pop(thread, None)

    def reading(self) -> str:
        """What is being read just now, for a person."""
        names = [self.source.paths[index] for index in list(self._reading.values())]
        return f"{', '.join(sorted(names)[:3])} of {self.source.root}" if names else str(self.source.root)

    def image(self, index: int) -> Pixels:
        """The pixels of an image, or of the next readable one."""
        if self.store is not None:
            return self.store.image(index)
        return self._next(index, self.decoder)

    def _item(self, index: int) -> Pixels | Encoded:
        """The same, but for a file that the GPU is to decode."""
        gpu = self.gpu_decoder
        if gpu is None or self.store is not None:
            return self.image(index)
        return self._next(index, lambda data: gpu.take(data) or self.decoder(data))

    def _next(self, index: int, decode: Callable[[bytes], Item]) -> Item:
        for step in range(len(self.source)):
            item = self._read((index + step) % len(self.source), decode)
            if item is not None:
                return item
        raise UserError(f"none of the {len(self.source)} images of {self.source.root} can be read")

    def _list(self, index: int, reason: str) -> None:
        with self._lock:
            if index in self.unreadable:
                return
            if not self.source.present():
                raise UserError(f"{self.source.root} has disappeared; bring it back and run the command again")
            self.unreadable.add(index)
            self.on_unreadable(self.source.paths[index], reason)
            if len(self.unreadable) > self.max_unreadable * len(self.source):
                raise UserError(
                    f"{len(self.unreadable)} of {len(self.source)} images cannot be read, the last one "
                    f"{self.source.paths[index]} ({reason}); mend them or raise data.max_unreadable"
                )

    def batches(self, order: Iterable[tuple[int, NDArray[np.int64]]], planner: Planner) -> Generator[Batch, None, None]:
        """A batch for each (epoch, indices), in order."""
        if self.num_workers == 0:
            for epoch, indices in order:
                yield self._assemble(epoch, indices, self._items(self._wanted(indices)), planner)
            return
        crew = _Crew(self, planner)
        switch = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            for epoch, indices in order:
                crew.order(epoch, indices)
                if len(crew.waiting) > AHEAD:
                    yield crew.next()
            while crew.waiting:
                yield crew.next()
        finally:
            crew.close()
            sys.setswitchinterval(switch)

    def _be_there(self) -> None:
        """A thread begins on the first GPU, whichever the others are on."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)

    def _items(self, indices: NDArray[np.int64]) -> list[Pixels | Encoded]:
        return [self._item(int(index)) for index in indices]

    def _wanted(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which of these must be brought: none if all lie on the GPU."""
        return indices[:0] if self.store is not None and self.store.on_gpu else indices

    def _assemble(
        self, epoch: int, indices: NDArray[np.int64], items: list[Pixels | Encoded], planner: Planner
    ) -> Batch:
        packed = self._pack(indices, items) if items else cast(Store, self.store).select(indices)
        return Batch(packed, planner(epoch, self.source.keys[indices], packed.sizes))

    def _pack(self, indices: NDArray[np.int64], items: list[Pixels | Encoded]) -> Packed:
        """Files that the GPU cannot decode are the CPU's, which finds out what is wrong with them."""
        if self.gpu_decoder is None:
            return pack(cast("list[Pixels]", items), self.pin)
        packed, failed = self.gpu_decoder.pack(items)
        if packed is None:
            for place in failed:
                items[place] = self.image(int(indices[place]))
            packed, _ = self.gpu_decoder.pack(items)
        if packed is None:  # whatever that was, it was not these files
            packed = pack([self.image(int(index)) for index in indices], self.pin)
        return packed


class _Crew:
    """The threads of a feed: some decode, one assembles. If they are stuck, others do their work again, in order."""

    def __init__(self, feed: Feed, planner: Planner) -> None:
        self.feed, self.planner = feed, planner
        self.waiting: deque[tuple[int, NDArray[np.int64], Future[Batch]]] = deque()
        self._begin()

    def _begin(self) -> None:
        self.decoders = Workers(self.feed.num_workers, "decode")
        self.assembler = Workers(1, "assemble", self.feed._be_there)

    def order(self, epoch: int, indices: NDArray[np.int64]) -> None:
        self.waiting.append((epoch, indices, self._submit(epoch, indices)))

    def _submit(self, epoch: int, indices: NDArray[np.int64]) -> Future[Batch]:
        wanted = self.feed._wanted(indices)
        parts = [wanted[i : i + TOGETHER] for i in range(0, len(wanted), TOGETHER)]
        read = [self.decoders.submit(self.feed._items, part) for part in parts]

        def collect() -> Batch:
            items = [item for part in read for item in part.result()]
            return self.feed._assemble(epoch, indices, items, self.planner)

        return self.assembler.submit(collect)

    def next(self) -> Batch:
        for last in (False, True):
            try:
                batch = result(self.waiting[0][2], self.decoders, self.assembler)
            except (Stuck, MemoryError) as error:
                reading = self.feed.reading()
                self.close()
                if last:
                    raise UserError(_remedy(error, reading)) from None
                print(f"{_trouble(error, reading)}; it is tried once more", file=sys.stderr)
                self._begin()
                again = [(epoch, indices) for epoch, indices, _ in self.waiting]
                self.waiting.clear()
                for epoch, indices in again:
                    self.order(epoch, indices)
            else:
                self.waiting.popleft()
                return batch
        raise AssertionError("unreachable")

    def close(self) -> None:
        # decoders first: an assembler then finds its images cancelled and gives up at once
        self.decoders.close()
        self.assembler.close()


def _trouble(error: Exception, reading: str) -> str:
    if isinstance(error, Stuck):
        return f"no image has come for a minute while reading {reading}"
    return f"there is no memory for {reading}"


def _remedy(error: Exception, reading: str) -> str:
    if isinstance(error, Stuck):
        return f"{_trouble(error, reading)}, twice; see to the disk or network it lies on, or remove it"
    return f"{_trouble(error, reading)}, twice; lower data.num_workers or data.max_side"
