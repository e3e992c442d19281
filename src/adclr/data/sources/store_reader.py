"""Reading parts of objects of a store for images: through the local cache, and ahead over many connections.

Where all objects of a collection fit into the cache, they are read in blocks of 4 MiB, which hold many images of a
shard; else each image is one request, so that no byte is read that is not wanted.
"""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from adclr.data.sources import Source
from adclr.system import stores
from adclr.system.stores import CONNECTIONS, StoreFile
from adclr.system.stores.cache import LocalCache, local_cache, part_name
from adclr.system.threads import ThreadPool

BLOCK = 2**22  # bytes
FITS = 0.8  # of the cache that a collection may fill for being read in blocks
NUM_AHEAD = 512  # images that are asked for before they are decoded: 8 for each connection
BLOCKS_AHEAD = 4  # of a shard that is read from its beginning to its end
Part = tuple[int, int]  # start and length in an object
Request = TypeVar("Request")


class StoreReader:
    """`reader.read(file, start, length)`; what was announced before is on its way then, or there."""

    def __init__(self, num_bytes: int, cached: bool = True) -> None:
        self.cache: LocalCache | None = local_cache() if cached else None
        self.in_blocks = self.cache is not None and num_bytes <= FITS * self.cache.limit
        self._present: set[str] = set()  # blocks that were in the cache
        self._lock = threading.Lock()
        self._coming: dict[str, Future[bytes]] = {}

    def read(self, file: StoreFile, start: int, length: int) -> bytes:
        """Return the bytes of a part of an object."""
        pieces = []
        for first, size in self._parts(file, start, length):
            skip, end = max(0, start - first), min(size, start + length - first)
            pieces.append(self._read_part(file, (first, size), skip, end - skip))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def streaming(self) -> StoreReader:
        """Return a reader for whole shards: what does not stay in the cache is not put there."""
        return self if self.in_blocks else StoreReader(0, cached=False)

    def announce(self, file: StoreFile, start: int, length: int) -> None:
        """Begin to fetch a part that will be read soon."""
        for part in self._parts(file, start, length):
            name = self._name(file, part)
            with self._lock:
                if name in self._coming or name in self._present:
                    continue
                self._coming[name] = _connections().submit(self._fetch, file, part)
                if len(self._coming) > 4 * NUM_AHEAD:  # of a reader that was closed before it read them
                    self._coming.pop(next(iter(self._coming)))

    def _parts(self, file: StoreFile, start: int, length: int) -> list[Part]:
        if not self.in_blocks:
            return [(start, length)]
        first, last = start // BLOCK, max(start, start + length - 1) // BLOCK
        return [(block * BLOCK, min(BLOCK, file.size - block * BLOCK)) for block in range(first, last + 1)]

    def _name(self, file: StoreFile, part: Part) -> str:
        return part_name(file.url, file.size, file.version, *part)

    def _read_part(self, file: StoreFile, part: Part, start: int, length: int) -> bytes:
        name = self._name(file, part)
        with self._lock:
            coming = self._coming.get(name)
        if coming is not None:
            try:
                data = coming.result()
            finally:
                with self._lock:
                    self._coming.pop(name, None)
            if len(data) == part[1]:
                return data[start : start + length]
        if self.cache is None:
            return stores.read(file, *part)[start : start + length]
        return self.cache.read(name, part[1], start, length, lambda: stores.read(file, *part))

    def _fetch(self, file: StoreFile, part: Part) -> bytes:
        """Return a part, or nothing if it was put into the cache for those who will read it there."""
        if self.cache is None:
            return stores.read(file, *part)
        name, size = self._name(file, part), part[1]
        whole = self.cache.read(name, size, 0, 0 if self.in_blocks else size, lambda: stores.read(file, *part))
        if self.in_blocks:
            self._present.add(name)
            return b""
        return whole


@cache
def _connections() -> ThreadPool:
    """Return the threads of this process that wait for stores."""
    return ThreadPool(CONNECTIONS, "store")


class StoredObject(io.RawIOBase):
    """An object as a file that can be read and moved in; what follows is fetched ahead."""

    def __init__(self, reader: StoreReader, file: StoreFile) -> None:
        self.reader, self.stored, self.position = reader, file, 0
        self._block: tuple[int, bytes] = -1, b""

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def seekable(self) -> bool:
        """Return that one can move in it."""
        return True

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position and return it."""
        self.position = max(0, offset + {0: 0, 1: self.position, 2: self.stored.size}[whence])
        return self.position

    def readinto(self, buffer: memoryview | bytearray) -> int:  # type: ignore[override]
        """Read the next bytes, at most to the end of a block."""
        if self.position >= self.stored.size:
            return 0
        number, start = divmod(self.position, BLOCK)
        if self._block[0] != number:
            self._block = number, self._fetch(number)
        data = self._block[1][start : start + len(buffer)]
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)

    def _fetch(self, number: int) -> bytes:
        for ahead in range(number + 1, number + 1 + BLOCKS_AHEAD):
            if ahead * BLOCK < self.stored.size:
                self.reader.announce(self.stored, *self._part(ahead))
        return self.reader.read(self.stored, *self._part(number))

    def _part(self, number: int) -> Part:
        return number * BLOCK, min(BLOCK, self.stored.size - number * BLOCK)


def read_ahead(
    requests: Iterable[Request], indices_of: Callable[[Request], NDArray[np.int64] | Sequence[int]], source: Source
) -> Iterator[Request]:
    """Yield requests unchanged; the images of those that follow are announced to the source, if it wants that."""
    most = source.num_ahead
    if not most:
        yield from requests
        return
    waiting: deque[tuple[Request, int]] = deque()
    num_announced = 0
    for request in requests:
        indices = indices_of(request)
        source.announce(indices)
        waiting.append((request, len(indices)))
        num_announced += len(indices)
        while waiting and num_announced - waiting[0][1] >= most:
            num_announced -= waiting[0][1]
            yield waiting.popleft()[0]
    for request, _ in waiting:
        yield request
