"""Stamps tell whether an image was replaced: its size and time of modification, or a hash of its content.

Reading the stamps of a million images from a local disk takes about 8 seconds (2 cores), from a network longer; to find
added and removed files only the folders are read. Contents are read only if `data.check=content` is set. Of more than
four million images, a run looks at the stamps of one million, which their keys choose, unless contents are asked for.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from adclr.data.key_order import smallest
from adclr.data.random_draws import Keys, mix
from adclr.data.sources import Source
from adclr.system.files import write_atomically
from adclr.system.progress import track

Check = Literal["time", "content"]
CHUNK = 256  # images that a thread handles at once
MOST_WATCHED, WATCHED = 2**22, 2**20  # images of which a run reads all stamps, and how many of more
STAT_THREADS = 16  # for a network file system; a local disk is as fast with fewer


@dataclass(frozen=True)
class Stamps:
    """One row for each image of a collection."""

    sizes: NDArray[np.int64]  # bytes
    times: NDArray[np.int64]  # of modification, ns
    contents: NDArray[np.uint64] | None = None  # hashes of the files, if they were read
    indices: NDArray[np.int64] | None = None  # of the images, unless these are all

    def __len__(self) -> int:
        return len(self.sizes)

    def of(self, indices: NDArray[np.int64]) -> Stamps:
        """Return the stamps of some images."""
        contents = None if self.contents is None else self.contents[indices]
        return Stamps(self.sizes[indices], self.times[indices], contents)

    def digests(self) -> dict[str, str]:
        """Return one hash of all sizes and times, and one of all contents if they were read."""
        hashes = {"time": _digest(np.stack([self.sizes, self.times]))}
        return hashes if self.contents is None else hashes | {"content": _digest(self.contents)}

    def save(self, path: Path, keys: Keys) -> None:
        """Write them to an .npz file in the order of the images' keys, whole or not at all."""
        keys = _watched_keys(keys, self.indices)
        order, buffer = np.argsort(keys, kind="stable"), io.BytesIO()
        sorted_ = self.of(order)
        arrays = {"keys": keys[order], "sizes": sorted_.sizes, "times": sorted_.times}
        if sorted_.contents is not None:
            arrays["contents"] = sorted_.contents
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        write_atomically(path, buffer.getvalue())


def watched_images(source: Source, check: Check) -> NDArray[np.int64] | None:
    """Return the indices of the images whose stamps a run looks at; None: of all."""
    if check == "content" or len(source) <= MOST_WATCHED:
        return None
    return np.sort(smallest(source.keys, WATCHED, mix))


def _watched_keys(keys: Keys, indices: NDArray[np.int64] | None) -> Keys:
    return keys if indices is None else np.asarray(keys[indices])


def read_stamps(
    source: Source,
    check: Check = "time",
    num_threads: int | None = None,
    indices: NDArray[np.int64] | None = None,
) -> Stamps:
    """Return the stamps of all images, or of those of some indices; with `check="content"` every image is read."""
    count = len(source) if indices is None else len(indices)
    stamp_of = source.stamp if indices is None else lambda row: source.stamp(int(indices[row]))
    pairs = np.array(_each(stamp_of, count, STAT_THREADS), np.int64).reshape(count, 2)
    stamps = Stamps(pairs[:, 0], pairs[:, 1], None, indices)
    if check == "time":
        return stamps

    def hashed(index: int) -> int:
        try:
            return int.from_bytes(blake2b(source.read(index), digest_size=8).digest(), "big")
        except OSError:
            return 0

    contents = _each(hashed, count, num_threads or os.cpu_count() or 1, "reading")
    return replace(stamps, contents=np.array(contents, np.uint64))


def fingerprint_files(source: Source) -> str:
    """Return a hash of the names and sizes of all images: the same wherever the collection is stored."""
    order = np.argsort(source.keys, kind="stable")
    return _digest(np.stack([source.keys[order].view(np.int64), read_stamps(source).sizes[order]]))


def load_stamps(path: Path, keys: Keys, indices: NDArray[np.int64] | None = None) -> Stamps | None:
    """Return the stamps that were saved for images of these keys, in their order; None if there are none.

    With indices only those of these images are asked for; the file may hold others too.
    """
    keys = _watched_keys(keys, indices)
    try:
        with np.load(path, allow_pickle=False) as file:
            known = file["keys"].astype(np.uint64)
            contents = file["contents"].astype(np.uint64) if "contents" in file else None
            stamps = Stamps(file["sizes"].astype(np.int64), file["times"].astype(np.int64), contents)
    except Exception:  # whatever is wrong with it, there is nothing to compare with
        return None
    columns = [column for column in (stamps.sizes, stamps.times, contents) if column is not None]
    order = np.argsort(keys, kind="stable")
    if any(column.shape != known.shape for column in columns):
        return None
    if indices is not None and len(known) > len(keys):  # written when the stamps of all were
        rows = np.searchsorted(known, keys[order]).clip(max=len(known) - 1)
        known, stamps = known[rows], stamps.of(rows)
    if not np.array_equal(known, keys[order]):
        return None
    return stamps.of(np.argsort(order))


def find_replaced(before: Stamps, now: Stamps, check: Check) -> NDArray[np.int64]:
    """Return the indices of images that are other files than before.

    By content, if that was asked for both times. Else an image was replaced if its size differs, or its time, unless no
    image at all has its old time: then the collection was copied or unpacked again, which gives every file a new time
    and must not end a run, so that sizes decide alone. A replacement of every image by one of the same size is the
    cost of that; `check="content"` notices it.
    """
    if check == "content" and before.contents is not None and now.contents is not None:
        return np.flatnonzero(before.contents != now.contents)
    other_time = before.times != now.times
    if other_time.all():
        other_time[:] = False
    return np.flatnonzero((before.sizes != now.sizes) | other_time)


def _each(function: Callable[[int], Any], count: int, num_threads: int, name: str = "") -> list[Any]:
    """Return what a function returns for each index, in order; computed by threads in chunks."""
    starts = range(0, count, CHUNK)

    def values_from(start: int) -> list[Any]:
        return [function(index) for index in range(start, min(start + CHUNK, count))]

    with ThreadPoolExecutor(num_threads) as pool:
        lists = track(pool.map(values_from, starts), name, len(starts), show=bool(name))
        return [value for values in lists for value in values]


def _digest(array: NDArray[Any]) -> str:
    return blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()
