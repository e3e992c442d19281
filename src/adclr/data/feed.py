"""Batches ahead of the step: threads read and decode files (decoding releases Python's lock), in a fixed order.

On a GPU one more thread renders them, on its own CUDA stream, while the step before runs: see `Prefetcher`.

Where there is a decoder on the GPU, threads only read the files that it takes, and it decodes a batch of them at once.

An unreadable image is listed once and replaced by a fixed rule: its place in a batch shows the pixels of the next
readable image in the order of paths, with the draws of its own key. So neither threads nor timing decide what a batch
contains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from threading import Event, Lock, get_ident
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adclr.config.parsing import UserError
from adclr.data import cache
from adclr.data.cache import Store
from adclr.data.decode import Pixels, Unreadable
from adclr.data.nvjpeg import Encoded, GpuDecoder
from adclr.data.packed import Packed, pack
from adclr.data.random_draws import Keys
from adclr.data.sources import Source, error_reason, raise_with_name
from adclr.data.sources.store_reader import read_ahead
from adclr.system import distributed, machine
from adclr.system.devices import set_current_device, shared_stream
from adclr.system.threads import NUM_ASSEMBLERS, load_in_order

# Once too many images are unreadable: how many are tried, and for how long (seconds), to find out how many there are.
SURVEY, SURVEY_SECONDS = 1000, 5.0

Item = TypeVar("Item", Pixels, Pixels | Encoded)
Plan = TypeVar("Plan")
Planner = Callable[[int, Keys, NDArray[np.int64]], Plan]  # (epoch, keys, sizes) -> the plan of a batch


@dataclass(frozen=True)
class Batch(Generic[Plan]):
    """Decoded images and the plan of their crops."""

    packed: Packed
    plan: Plan
    epoch: int
    indices: NDArray[np.int64]  # of the images in the order; `Feed.shown` returns whose pixels these are


class Feed:
    """Reads images of a source into batches; remembers which cannot be read."""

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
        self.store: Store | None = None  # all images, decoded, if they are cached
        self.unreadable: set[int] = set()
        self._refusal = ""  # the message once too many are unreadable
        self._lock = Lock()
        self._reading: dict[int, int] = {}  # index of the image that each thread is reading
        self._gpu = torch.cuda.current_device() if pin else None

    # -- batches --

    def batches(
        self, order: Iterable[tuple[int, NDArray[np.int64]]], planner: Planner[Plan]
    ) -> Generator[Batch[Plan], None, None]:
        """Yield a batch for each (epoch, indices), in order: some threads decode, others pack and plan."""
        cached_on_gpu = self.store is not None and self.store.on_gpu

        def indices_to_read(batch: tuple[int, NDArray[np.int64]]) -> NDArray[np.int64]:
            return batch[1][:0] if cached_on_gpu else batch[1]

        def assemble(batch: tuple[int, NDArray[np.int64]], items: list[Pixels | Encoded]) -> Batch[Plan]:
            epoch, indices = batch
            packed = self._pack(indices, items) if items else cast(Store, self.store).select(indices)
            return Batch(packed, planner(epoch, self.source.keys[indices], packed.sizes), epoch, indices)

        return load_in_order(
            order if self.store is not None else read_ahead(order, indices_to_read, self.source),
            indices_to_read,
            self._load,
            assemble,
            self.reading,
            self.num_workers,
            self._gpu,
            # one where nothing is waited for: two took Python's lock from the thread that launches kernels
            assemblers=1 if cached_on_gpu else NUM_ASSEMBLERS,
        )

    def _load(self, index: int) -> Pixels | Encoded:
        """Return the pixels of an image, or its file if the GPU is to decode it."""
        gpu = self.gpu_decoder
        if gpu is None or self.store is not None:
            return self.image(index)
        return self._first_readable(index, lambda data: gpu.take(data) or self.decoder(data))

    def _pack(self, indices: NDArray[np.int64], items: list[Pixels | Encoded]) -> Packed:
        """Pack a batch. Files that the GPU cannot decode go to the CPU, which finds out what is wrong with them."""
        if self.gpu_decoder is None:
            return pack(cast("list[Pixels]", items), self.pin)
        packed, failed = self.gpu_decoder.pack(items)
        if packed is None:
            for position in failed:
                items[position] = self.image(int(indices[position]))
            packed, _ = self.gpu_decoder.pack(items)
        if packed is None:  # for a reason that is not in these files
            packed = pack([self.image(int(index)) for index in indices], self.pin)
        return packed

    def keep(self, mode: cache.Mode, device: torch.device) -> None:
        """Decode all images once and cache them, if the setting says so and they fit."""
        with self.keeping(mode, device):
            pass

    @contextmanager
    def keeping(self, mode: cache.Mode, device: torch.device) -> Iterator[None]:
        """Decode all images meanwhile, in other threads, and cache them at the end, as `keep` does.

        A GPU gets them at the end only, so that its memory can be measured meanwhile.
        """
        gpu = machine.available_gpu_memory(device) if device.type == "cuda" else 0.0
        free = cache.FreeMemory(machine.host_memory() / distributed.local_world_size(), gpu)
        stop = Event()
        with ThreadPoolExecutor(1, "cache") as thread:
            decoded = thread.submit(
                cache.decode_all,
                mode,
                self.read,
                len(self.source),
                self.num_workers,
                free,
                device,
                distributed.is_main(),
                self.reading,
                lambda parts: read_ahead(parts, lambda part: part, self.source),
                stop.is_set,
            )
            try:
                yield
                images = decoded.result()
            except BaseException:
                stop.set()  # else the end of this block would wait for all images
                raise
        self.store = None if images is None else images.place(device)

    def rate(self, batch: int = 128, batches: int = 4, seconds: float = float("inf")) -> float:
        """Return the images/s that are read and decoded when nothing else runs; the first batch is not timed.

        No batch is begun after so many seconds.
        """
        indices = np.linspace(0, len(self.source) - 1, (1 + batches) * batch).astype(np.int64)
        count = 0
        with closing(self.batches(((0, part) for part in np.split(indices, 1 + batches)), lambda *_: None)) as decoded:
            next(decoded)
            started = time.perf_counter()
            for loaded in decoded:
                count, spent = count + len(loaded.packed.sizes), time.perf_counter() - started
                if spent > seconds:
                    break
        return count / spent

    # -- single images --

    def image(self, index: int) -> Pixels:
        """Return the pixels of an image, or of the next readable one."""
        if self.store is not None:
            return self.store.image(index)
        return self._first_readable(index, self.decoder)

    def _first_readable(self, index: int, decode: Callable[[bytes], Item]) -> Item:
        for step in range(len(self.source)):
            item = self._read((index + step) % len(self.source), decode)
            if item is not None:
                return item
        raise UserError(f"none of the {len(self.source)} images of {self.source.root} can be read")

    def read(self, index: int) -> Pixels | None:
        """Return the pixels of an image; list it and return None if it cannot be read."""
        return self._read(index, self.decoder)

    def _read(self, index: int, decode: Callable[[bytes], Item]) -> Item | None:
        if index in self.unreadable:
            return None
        thread = get_ident()
        self._reading[thread] = index
        try:
            return decode(self.source.read(index))
        except (Unreadable, OSError) as error:
            self._list_unreadable(index, error_reason(error))
            return None
        except Exception as error:
            raise_with_name(error, self.source, index)
        finally:
            self._reading.pop(thread, None)

    def reading(self) -> str:
        """Return what is being read at the moment, for a message."""
        names = [self.source.paths[index] for index in list(self._reading.values())]
        return f"{', '.join(sorted(names)[:3])} of {self.source.root}" if names else str(self.source.root)

    # -- unreadable images --

    def num_unreadable(self) -> int:
        """Return how many images any process has come upon that cannot be read."""
        indices = distributed.gather(torch.tensor(sorted(self.unreadable), dtype=torch.int64))
        return len(set(indices.tolist()))

    def shown(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return whose pixels a finished batch shows in the places of these images."""
        with self._lock:
            unreadable = list(self.unreadable)
        shown = indices.copy()
        while (bad := np.isin(shown, unreadable)).any():
            shown[bad] = (shown[bad] + 1) % len(self.source)
        return shown

    def _list_unreadable(self, index: int, reason: str) -> None:
        with self._lock:
            if self._refusal:  # by another thread
                raise UserError(self._refusal)
            if index in self.unreadable:
                return
            self._add_unreadable(index, reason)
            if len(self.unreadable) > self.max_unreadable * len(self.source):
                self._refusal = (
                    f"{self._count_unreadable()} cannot be read, for example {self.source.paths[index]} ({reason}); "
                    "fix them or raise max_unreadable"
                )
                raise UserError(self._refusal)

    def _add_unreadable(self, index: int, reason: str) -> None:
        lost = self.source.lost(index)
        if lost is not None:  # its files are good, and would only be listed one after the other
            raise UserError(
                f"{lost} does not exist or has disappeared; restore it or correct its path, and run the command again"
            )
        self.unreadable.add(index)
        self.on_unreadable(self.source.paths[index], reason)

    def _count_unreadable(self) -> str:
        """Say how many images are unreadable: of all if they are few, else of a sample spread over them.

        Without it the message would count what the first threads came upon: 1 of 5, where 4 are unreadable.
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
                    self._add_unreadable(index, error_reason(error))
                except Exception as error:
                    raise_with_name(error, self.source, index)
            bad += 1
        if tried == count:
            return f"{bad} of {count} images"
        return f"at least {len(self.unreadable)} of {count} images ({bad} of the {tried} that were tried)"


# -- rendering ahead --


class Rendered(Protocol):
    """What is rendered of a batch."""

    def tensors(self) -> list[Tensor]:
        """Return all its tensors."""
        ...


R = TypeVar("R", bound=Rendered)


class Prefetcher(Generic[R]):
    """An iterator over what is rendered of batches; closing it closes the batches.

    Views of three batches are in memory at most: of the one the GPU works on, of the one that is queued behind it, and
    of the one being rendered.
    """

    def __init__(
        self, batches: Generator[Batch[Any], None, None], render: Callable[[Batch[Any]], R], device: torch.device
    ) -> None:
        self.batches, self.render, self.device = batches, render, device
        self.seconds_waited = 0.0  # for images, by the thread that takes the views
        self.last: R | None = None  # that was taken
        self._thread: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            self.stream = shared_stream("views", device)
            self.stream.wait_stream(torch.cuda.current_stream(device))
            self._used: torch.cuda.Event | None = None  # the end of the work on the views before the last
            self._thread = ThreadPoolExecutor(1, "views", set_current_device, (device,))
            self._next: Future[tuple[R, torch.cuda.Event] | None] = self._thread.submit(self._render_next)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> R:
        if self._thread is None:
            started = time.monotonic()
            batch = next(self.batches)
            self.seconds_waited += time.monotonic() - started
            self.last = self.render(batch)
            return self.last
        current = torch.cuda.current_stream(self.device)
        queued = current.record_event()
        if self._used is not None:
            self._used.synchronize()  # else the host would run ahead of the GPU, and memory fill with views
        self._used = queued
        started = time.monotonic()
        rendered = self._next.result()
        self.seconds_waited += time.monotonic() - started
        if rendered is None:
            raise StopIteration
        self._next = self._thread.submit(self._render_next)
        views, ready = rendered
        current.wait_event(ready)
        for tensor in views.tensors():
            tensor.record_stream(current)  # its memory is not reused before this stream is done with it
        self.last = views
        return views

    def _render_next(self) -> tuple[R, torch.cuda.Event] | None:
        """Return the next views and the event after which they are ready; None after the last batch."""
        batch = next(self.batches, None)
        if batch is None:
            return None
        with torch.cuda.stream(self.stream):
            if batch.packed.bytes.is_cuda:
                batch.packed.bytes.record_stream(self.stream)
            return self.render(batch), self.stream.record_event()

    def close(self) -> None:
        """Stop the thread and close the batches."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self.batches.close()
