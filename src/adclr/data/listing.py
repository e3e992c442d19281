"""An index of a collection: made once, kept beside the run, and checked cheaply for change.

A million files can take minutes to find on a shared disk; that nothing has been added or removed shows in the change
times of the folders (or the shards), of which there are a thousand times fewer.
"""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Fact = tuple[int, ...]  # is it a file; when it and its record changed (ns); which it is; its bytes (0 for a folder)
Facts = dict[str, Fact]


@dataclass(frozen=True)
class Listing:
    names: list[str]  # of all items, in order
    facts: Facts  # of each folder or shard, by its full path
    places: NDArray[np.int64]  # n×3: number of the shard (in the order of `facts`), offset, bytes; 0×3 for a folder
    labels: list[str]  # one for each item, or none at all
    problems: dict[str, str] = field(default_factory=dict)  # by full path: damaged shards, links that lead nowhere

    def current(self) -> bool:
        """Whether the collection is still what was indexed."""
        try:
            same = all(fact(path, bool(known[0])) == known for path, known in self.facts.items())
        except OSError:
            return False
        # the folder of a link does not change when the file that the link leads to comes back
        return same and not any(path not in self.facts and os.path.exists(path) for path in self.problems)

    def save(self, path: Path) -> None:
        """To one .npz file, whole or not at all."""
        arrays = {
            "names": _text(self.names),
            "labels": _text(self.labels),
            "facts": np.frombuffer(json.dumps(self.facts).encode(), np.uint8),
            "places": self.places,
            "problems": np.frombuffer(json.dumps(self.problems).encode(), np.uint8),
        }
        temporary = path.with_name(f".{path.name}.tmp")
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, path)


def load(path: Path) -> Listing | None:
    """The index in a file; None if there is none that can be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                return None  # not ours, and of any size once it is unpacked
        with np.load(path, allow_pickle=False) as file:
            facts = {str(k): tuple(int(n) for n in v) for k, v in json.loads(file["facts"].tobytes()).items()}
            problems = {str(k): str(v) for k, v in json.loads(file["problems"].tobytes()).items()}
            places = file["places"].astype(np.int64)
            found = Listing(_lines(file["names"]), facts, places, _lines(file["labels"]), problems)
    except Exception:  # whatever is wrong with it, the collection can be indexed again
        return None
    shape = (len(found.names), 3)
    if not found.names or not found.facts:
        return None
    return found if found.places.shape in (shape, (0, 3)) and len(found.labels) in (0, shape[0]) else None


def fact(path: str | Path, is_file: bool) -> Fact:
    status = os.stat(path)
    size = status.st_size if is_file else 0
    return int(is_file), status.st_mtime_ns, status.st_ctime_ns, status.st_ino, size


def _text(lines: list[str]) -> NDArray[np.uint8]:
    """Names can hold any byte but NUL."""
    return np.frombuffer("\0".join(lines).encode("utf-8", "surrogateescape"), np.uint8)


def _lines(array: NDArray[np.uint8]) -> list[str]:
    text = array.tobytes().decode("utf-8", "surrogateescape")
    return text.split("\0") if text else []
