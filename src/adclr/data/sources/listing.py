"""The index of a collection, as a file of a run: what a search has listed, and by what a change of it is noticed."""

from __future__ import annotations

import io
import json
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from adclr.system import stores
from adclr.system.files import write_atomically
from adclr.system.stores.urls import is_remote

NO_EXTENTS = np.zeros((0, 3), np.int64)
Fact = tuple[int, ...]  # 1 if it is a file; mtime and ctime (ns); inode; bytes (0 for a folder)
Facts = dict[str, Fact]


@dataclass(frozen=True)
class Listing:
    """The index of a collection: its items, and by what a change of it is noticed."""

    names: list[str]  # of all items, in order
    facts: Facts  # of each folder or shard, by its full path
    places: NDArray[np.int64]  # n×3: number of the shard (in the order of `facts`), offset, bytes; 0×3 for a folder
    labels: list[str]  # one for each item, or none at all
    problems: dict[str, str] = field(default_factory=dict)  # by full path: damaged shards, dangling links
    keyed_by_member: bool = False  # of shards: keys do not depend on the shard; false in indexes of version 0.1

    def current(self) -> bool:
        """Return whether the collection is still what was indexed."""
        try:
            same = all(fact(path, bool(known[0])) == known for path, known in self.facts.items() if not is_remote(path))
            remote = [path for path in self.facts if is_remote(path)] if same else []
            same = same and stores.in_parallel(lambda path: fact(path, True), remote) == [self.facts[p] for p in remote]
        except OSError:
            return False
        # the folder of a link does not change when the file that the link points to is restored
        return same and not any(path not in self.facts and os.path.exists(path) for path in self.problems)

    def save(self, path: Path) -> None:
        """Write the index to one .npz file, whole or not at all."""
        arrays = {
            "names": _text(self.names),
            "labels": _text(self.labels),
            "facts": np.frombuffer(json.dumps(self.facts).encode(), np.uint8),
            "places": self.places,
            "problems": np.frombuffer(json.dumps(self.problems).encode(), np.uint8),
            "keyed_by_member": np.array(self.keyed_by_member),
        }
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        write_atomically(path, buffer.getvalue(), durable=False)


def load_listing(path: Path) -> Listing | None:
    """Return the index in a file; None if it cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                return None  # not written by `save`, and of any size once it is unpacked
        with np.load(path, allow_pickle=False) as file:
            facts = {str(k): tuple(int(n) for n in v) for k, v in json.loads(file["facts"].tobytes()).items()}
            problems = {str(k): str(v) for k, v in json.loads(file["problems"].tobytes()).items()}
            places = file["places"].astype(np.int64)
            keyed = "keyed_by_member" in file and bool(file["keyed_by_member"])
            listing = Listing(_lines(file["names"]), facts, places, _lines(file["labels"]), problems, keyed)
    except Exception:  # whatever is wrong with it, the collection can be indexed again
        return None
    shape = (len(listing.names), 3)
    if not listing.names or not listing.facts:
        return None
    return listing if listing.places.shape in (shape, (0, 3)) and len(listing.labels) in (0, shape[0]) else None


def fact(path: str | Path, is_file: bool) -> Fact:
    """Return the facts of a file or folder, by which a change of it is noticed."""
    if is_remote(str(path)):
        stored = stores.stat(str(path))
        return 1, stored.version, 0, 0, stored.size
    status = os.stat(path)
    size = status.st_size if is_file else 0
    return int(is_file), status.st_mtime_ns, status.st_ctime_ns, status.st_ino, size


def _text(lines: list[str]) -> NDArray[np.uint8]:
    """Encode lines, which can contain any byte but NUL."""
    return np.frombuffer("\0".join(lines).encode("utf-8", "surrogateescape"), np.uint8)


def _lines(array: NDArray[np.uint8]) -> list[str]:
    text = array.tobytes().decode("utf-8", "surrogateescape")
    return text.split("\0") if text else []
