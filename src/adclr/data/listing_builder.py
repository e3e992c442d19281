"""Building the index of a collection in bounded memory: what is long is written to a disk, and sorted there.

The index of a long collection is then kept in the folder of the local cache, where other processes and runs use it. One
process makes it while those that want the same one wait. Up to two million images everything stays in memory.
"""

from __future__ import annotations

import heapq
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from adclr.data.key_order import examine_keys
from adclr.data.listing import NO_EXTENTS, NO_NAMES, Facts, Listing, Names, load_listing
from adclr.data.random_draws import Keys
from adclr.system.files import lock_file
from adclr.system.stores import cache as store_cache
from adclr.system.text import printable

SORTED_AT_ONCE = 2**21  # names: about 250 MB
IN_MEMORY = 2**26  # bytes of one array
BLOCK = 2**20  # bytes of sorted names that are read back at once
NAMES_AT_ONCE = 2**14  # that are encoded and hashed together


class AlreadyIndexedError(Exception):
    """Another process has made the index that was about to be made."""

    def __init__(self, listing: Listing) -> None:
        super().__init__()
        self.listing = listing


class Storage:
    """A place on a disk for the index of one collection while it is made, which is locked once it is used."""

    def __init__(self, collection: Sequence[str]) -> None:
        self.path, self.collection = shared_path(collection), collection
        self.shared = False  # whether the index is to be kept for other processes
        self._folder: str | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def new_file(self) -> IO[bytes]:
        """Return a new file without a name, of which nothing stays."""
        if self._folder is None:
            self._folder = self._lock_folder()
        return tempfile.TemporaryFile(dir=self._folder)

    def _lock_folder(self) -> str:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = self._open.enter_context(self.path.with_suffix(".lock").open("ab"))
        except OSError:  # a home that cannot be written
            return tempfile.gettempdir()
        try:
            lock_file(lock)
        except BlockingIOError:
            if os.environ.get("RANK", "0") == "0":
                print(printable(f"another process indexes {self.collection[0]}; waiting for it"), file=sys.stderr)
            lock_file(lock, wait=True)
        listing = load_shared(self.collection)
        if listing is not None:
            raise AlreadyIndexedError(listing)
        self.shared = True
        return str(self.path.parent)


def shared_path(collection: Sequence[str]) -> Path:
    """Return the file in the local cache for the index of a folder or of shards, by their full paths or URLs."""
    name = blake2b("\0".join(collection).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return store_cache.current_folder() / "indexes" / f"{name}.npz"


def load_shared(collection: Sequence[str]) -> Listing | None:
    """Return the index that another process has made, if it describes the collection as it is now."""
    listing = load_listing(shared_path(collection))
    if listing is None or list(islice(listing.facts, len(collection))) != list(collection):
        return None
    return listing if listing.current() else None


def build_listing(collection: Sequence[str], build: Callable[[Storage], Listing]) -> Listing:
    """Return the index of a folder or of shards that `build` makes, or that was made and is still true."""
    listing = load_shared(collection)
    if listing is not None:
        return listing
    with Storage(collection) as storage:
        try:
            listing = build(storage)
        except AlreadyIndexedError as other:
            return other.listing
        if not storage.shared:
            return listing
        try:
            listing.save(storage.path)
        except OSError:  # no room for it: this process has it nevertheless
            return listing
        return load_listing(storage.path) or listing


class Column:
    """An array to which parts are appended; a long one is on a disk."""

    def __init__(self, dtype: type[np.generic], storage: Storage) -> None:
        self.dtype, self.storage, self.count = np.dtype(dtype), storage, 0
        self._parts: list[NDArray[Any]] = []
        self._file: IO[bytes] | None = None

    def append(self, part: NDArray[Any]) -> None:
        """Append one part."""
        self._parts.append(part)
        self.count += len(part)
        if self._file is None and self.count * self.dtype.itemsize > IN_MEMORY:
            self._file = self.storage.new_file()
        if self._file is not None:
            for waiting in self._parts:
                self._file.write(waiting.tobytes())
            self._parts = []

    def array(self) -> NDArray[Any]:
        """Return the whole array."""
        if self._file is None:
            return np.concatenate([np.zeros(0, self.dtype), *self._parts])
        self._file.flush()
        return np.asarray(np.memmap(self._file, self.dtype, "r", shape=(self.count,)))


class NameColumn:
    """Names that are appended in their final order."""

    def __init__(self, storage: Storage) -> None:
        self.text, self.ends, self.bytes = Column(np.uint8, storage), Column(np.int64, storage), 0

    def append(self, names: Sequence[bytes]) -> None:
        """Append some names."""
        ends = np.cumsum(np.fromiter(map(len, names), np.int64, len(names)) + 1) - 1
        separator = b"\0" if self.ends.count else b""
        self.text.append(np.frombuffer(separator + b"\0".join(names), np.uint8))
        self.ends.append(ends + self.bytes)
        self.bytes += int(ends[-1]) + 1

    def names(self) -> Names:
        """Return all names."""
        return Names(self.text.array(), self.ends.array())


class ListingBuilder:
    """Makes an index of images that are given in their final order."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.names, self.labels = storage, NameColumn(storage), NameColumn(storage)
        self.keys, self.places = Column(np.uint64, storage), Column(np.int64, storage)

    def __len__(self) -> int:
        return self.names.ends.count

    def add(
        self,
        names: Sequence[bytes],
        places: Sequence[tuple[int, int, int]] = (),
        labels: Sequence[bytes] = (),
        keyed: Sequence[bytes] | None = None,
    ) -> None:
        """Append images; their keys are hashes of `keyed`, or of their names. Labels may be left out where none is."""
        if not names:
            return
        if any(labels):
            missing = len(self) - self.labels.ends.count
            for first in range(0, missing, NAMES_AT_ONCE):  # of those before, which had none
                self.labels.append([b""] * min(NAMES_AT_ONCE, missing - first))
            self.labels.append(labels)
        elif self.labels.ends.count:
            self.labels.append([b""] * len(names))
        self.names.append(names)
        self.keys.append(_hash(names if keyed is None else keyed))
        if places:
            self.places.append(np.array(places, np.int64).reshape(-1))

    def listing(self, facts: Facts, problems: dict[str, str], keyed_by_member: bool = False) -> Listing:
        """Return the index; where members of two shards have the same name, keys are hashes of SHARD/MEMBER."""
        names, keys = self.names.names(), self.keys.array()
        places = self.places.array().reshape(-1, 3) if self.places.count else NO_EXTENTS
        examined = examine_keys(keys)
        if keyed_by_member and not examined.distinct:
            column = Column(np.uint64, self.storage)
            texts = iter(names)
            while part := list(islice(texts, NAMES_AT_ONCE)):
                column.append(_hash(encode(part)))
            keys = column.array()
            examined = examine_keys(keys)
        labels = self.labels.names() if self.labels.ends.count else NO_NAMES
        return Listing(names, keys, facts, places, labels, problems, keyed_by_member, None, examined.fingerprint)


def encode(texts: Iterable[str]) -> list[bytes]:
    """Return the bytes of names, of which those that are no text are as they were."""
    return [text.encode("utf-8", "surrogateescape") for text in texts]


def _hash(texts: Sequence[bytes]) -> Keys:
    """Return `key_of` of each text."""
    digests = b"".join(blake2b(text, digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, "<u8").astype(np.uint64)


class SortedNames:
    """Names that are given in any order; more than fit into memory are sorted in runs, which are merged."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.count = storage, 0
        self.runs: list[tuple[str, str, Iterator[list[bytes]]]] = []  # first and last name, and all in order

    def add(self, names: list[str]) -> None:
        """Take names as one run, which may be as long as fits into memory, and write it to the disk."""
        self.count += len(names)
        names = sorted(names)
        file = self.storage.new_file()
        for first in range(0, len(names), NAMES_AT_ONCE):
            file.write(b"\0".join(encode(names[first : first + NAMES_AT_ONCE])) + b"\0")
        self.runs.append((names[0], names[-1], _read_back(file)))

    def parts(self, rest: list[str]) -> Iterator[list[bytes]]:
        """Yield all names in order, with those that are left; of equal ones all."""
        rest = sorted(rest)
        if rest:
            parts = (encode(rest[first : first + NAMES_AT_ONCE]) for first in range(0, len(rest), NAMES_AT_ONCE))
            self.runs.append((rest[0], rest[-1], parts))
        overlapping: list[Iterator[list[bytes]]] = []
        end = ""
        for first, last, run in sorted(self.runs, key=lambda run: run[:2]):
            if overlapping and first > end:
                yield from _merge(overlapping)
                overlapping = []
            overlapping.append(run)
            end = max(end, last)
        yield from _merge(overlapping)


def _read_back(file: IO[bytes]) -> Iterator[list[bytes]]:
    """Yield the names of a run in order."""
    file.seek(0)
    begun = b""
    while block := file.read(BLOCK):
        *names, begun = (begun + block).split(b"\0")
        yield names
    file.close()


def _merge(runs: Sequence[Iterator[list[bytes]]]) -> Iterator[list[bytes]]:
    """Yield the names of some runs in order; a run that overlaps no other is not compared."""
    if len(runs) == 1:
        yield from runs[0]
        return
    merged = heapq.merge(*(map(_decode, chain.from_iterable(run)) for run in runs))  # bytes have another order
    while part := list(islice(merged, NAMES_AT_ONCE)):
        yield encode(part)


def _decode(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
