"""Batches ahead of the step: files are read and decoded by threads (decoding leaves Python's lock), in a fixed order.

Where there is a decoder on the GPU, threads only read what it takes, and it decodes a batch of them at once.

An unreadable image is listed once and its place is filled by a fixed rule: the pixels of the next readable image in the
order of paths, with the draws of the place's own key. So neither threads nor luck decide what a batch holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from adclr.config.sections import UserError
from adclr.data import cache
from adclr.data.augment import Packed, pack
from adclr.data.cache import Store
from adclr.data.decode import Pixels, Unreadable
from adclr.data.draws import Words
from adclr.data.nvjpeg import Encoded, GpuDecoder
from adclr.data.sources import Source, fail, reason_of
from adclr.system import distributed, machine
from adclr.system.threads import ASSEMBLERS, in_order

SURVEY, SURVEY_SECONDS = 1000, 5.0  # images, and time, to find out how many are bad once too many are

Item = TypeVar("Item", Pixels, Pixels | Encoded)
Plan = TypeVar("Plan")
Planner = Callable[[int, Words, NDArray[np.int64]], Plan]  # (epoch, keys, sizes) -> what is made of the batch


@dataclass(frozen=True)
class Batch(Generic[Plan]):
    packed: Packed
    plan: Plan
    epoch: int
    indices: NDArray[np.int64]  # of the images whose places these are


class Feed:
    """Reads images of a source; remembers which cannot be used."""

    def __init__(
        self,
        source: Source,
        num_workers: int,
        decoder: Callable[[bytes], Pixels],
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
        self._refusal = ""  # too many of them
        self._lock = Lock()
        self._reading: dict[int, int] = {}  # by thread
        self._gpu = torch.cuda.current_device() if pin else None

    def keep(self, mode: cache.Mode, device: torch.device) -> None:
        """Decodes all images once and for all, if the setting says so and they fit."""
        gpu = machine.available(device) if device.type == "cuda" else 0.0
        room = cache.Room(machine.host_memory() / distributed.local_world_size(), gpu)
        self.store = cache.make(
            mode, self.read, len(self.source), self.num_workers, room, device, distributed.is_main(), self.reading
        )

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
            self._list(index, reason_of(error))
            return None
        except Exception as error:
            fail(error, self.source, index)
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

    def num_unreadable(self) -> int:
        """As far as any process has seen."""
        listed = distributed.gather(torch.tensor(sorted(self.unreadable), dtype=torch.int64))
        return len(set(listed.tolist()))

    def shown(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Whose pixels a batch has in the places of these images, once it is made."""
        with self._lock:
            listed = list(self.unreadable)
        found = indices.copy()
        while (bad := np.isin(found, listed)).any():
            found[bad] = (found[bad] + 1) % len(self.source)
        return found

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
            if self._refusal:  # which another thread has found out
                raise UserError(self._refusal)
            if index in self.unreadable:
                return
            self._add(index, reason)
            if len(self.unreadable) > self.max_unreadable * len(self.source):
                self._refusal = (
                    f"{self._survey()} cannot be read, for example {self.source.paths[index]} ({reason}); "
                    "mend them or raise max_unreadable"
                )
                raise UserError(self._refusal)

    def _add(self, index: int, reason: str) -> None:
        lost = self.source.lost(index)
        if lost is not None:  # its files are good, and would only be listed one after the other
            raise UserError(f"{lost} has disappeared; bring it back and run the command again")
        self.unreadable.add(index)
        self.on_unreadable(self.source.paths[index], reason)

    def _survey(self) -> str:
        """How many images are bad: of all if they are few, else at least, with those of a sample spread over them.

        Without it the sentence would count what the first threads came upon: 1 of 5, where 4 are bad.
        """
        count, bad, tried = len(self.source), 0, 0
        end = time.monotonic() + SURVEY_SECONDS
        for index in np.unique(np.linspace(0, count - 1, min(count, SURVEY)).astype(int)).tolist():
            if time.monotonic() > end:
                break
            tried += 1
            if index not in self.unreadable:
                try:
                    self.decoder(self.source.read(index))
                    continue
                except (Unreadable, OSError) as error:
                    self._add(index, reason_of(error))
                except Exception as error:
                    fail(error, self.source, index)
            bad += 1
        if tried == count:
            return f"{bad} of {count} images"
        return f"at least {len(self.unreadable)} of {count} images ({bad} of the {tried} that were tried)"

    def batches(
        self, order: Iterable[tuple[int, NDArray[np.int64]]], planner: Planner[Plan]
    ) -> Generator[Batch[Plan], None, None]:
        """A batch for each (epoch, indices), in order."""
        there = self.store is not None and self.store.on_gpu  # then nothing must be brought
        return in_order(
            order,
            lambda job: job[1][:0] if there else job[1],
            self._item,
            lambda job, items: self._assemble(*job, items, planner),
            self.reading,
            self.num_workers,
            self._gpu,
            assemblers=1 if there else ASSEMBLERS,  # and no one waits: two took Python's lock from who launches kernels
        )

    def _assemble(
        self, epoch: int, indices: NDArray[np.int64], items: list[Pixels | Encoded], planner: Planner[Plan]
    ) -> Batch[Plan]:
        packed = self._pack(indices, items) if items else cast(Store, self.store).select(indices)
        return Batch(packed, planner(epoch, self.source.keys[indices], packed.sizes), epoch, indices)

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

    def rate(self, batch: int = 128, batches: int = 4, seconds: float = float("inf")) -> float:
        """Images/s that are read and decoded when nothing else runs; one batch before is not timed.

        No batch is begun after so many seconds.
        """
        spread = np.linspace(0, len(self.source) - 1, (1 + batches) * batch).astype(np.int64)
        count = 0
        with closing(self.batches(((0, part) for part in np.split(spread, 1 + batches)), lambda *_: None)) as made:
            next(made)
            started = time.perf_counter()
            for found in made:
                count, spent = count + len(found.packed.sizes), time.perf_counter() - started
                if spent > seconds:
                    break
        return count / spent
