"""Collections of images behind one interface, `Source`: a folder, a list, tar shards, tables, object stores.

Sources give names, keys, bytes and labels; `decode` turns bytes into pixels. An item's key is a hash of its name, so a
collection is the same wherever it is stored. `data.collection` opens the source that a user names.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from adclr.config.parsing import UserError
from adclr.data.random_draws import Keys, key_of
from adclr.data.sources.listing import Listing
from adclr.system.text import printable

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")


class Source:
    """A collection of images; here of files below a folder, which other sources change."""

    num_ahead = 0  # items that are announced before they are read; of stores only

    def __init__(self, root: Path | str, paths: Sequence[str], listing: Listing | None = None) -> None:
        self.root, self.paths = root, paths  # what the user named (a URL is text); the name of each item
        self.listing = listing  # the index of the collection, where searching it again takes long

    @cached_property
    def keys(self) -> Keys:
        """Return the 64-bit key of each item."""
        return np.fromiter((key_of(path) for path in self.paths), np.uint64, len(self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def label(self, index: int) -> str | None:
        """Return the first folder of the item's name, or None; only evaluations use labels."""
        first, slash, _ = self.paths[index].partition("/")
        return first if slash else None

    def fingerprint(self) -> str:
        """Return a hash of all keys: the same wherever the collection is stored."""
        return blake2b(np.sort(self.keys).tobytes(), digest_size=16).hexdigest()

    def file(self, index: int) -> str:
        """Return the path of the file that contains an item."""
        return os.path.join(self.root, self.paths[index])

    def read(self, index: int) -> bytes:
        """Return the encoded image."""
        return read_file(self.file(index))

    def announce(self, indices: Iterable[int]) -> None:
        """Begin to fetch items that will be read soon; files on a disk are read when they are asked for."""

    def lost(self, index: int) -> str | None:
        """Return what has disappeared with an unreadable item, the collection or a folder; None: only the item."""
        return lost_folder(self.file(index)) if os.path.exists(self.root) else str(self.root)

    def stamp(self, index: int) -> tuple[int, int]:
        """Return the size of an item in bytes and when it was modified (ns); (-1, 0) if the file does not exist."""
        try:
            status = os.stat(self.file(index))
        except OSError:
            return -1, 0
        return status.st_size, status.st_mtime_ns

    def holds(self, folder: str | Path) -> bool:
        """Return whether images of the collection are in this folder, or are searched for in it."""
        folders = {os.path.dirname(self.file(index)) for index in range(len(self))}
        return os.path.realpath(folder) in {os.path.realpath(path) for path in folders}


class Files(Source):
    """Image files given one by one, named by their paths below their common folder; a label is the file's folder."""

    def __init__(self, paths: Sequence[str]) -> None:
        full = [os.path.abspath(path) for path in paths]
        root = os.path.commonpath([os.path.dirname(path) for path in full])
        super().__init__(Path(root), [os.path.relpath(path, root) for path in full])

    def label(self, index: int) -> str | None:
        """Return the folder of the file."""
        return os.path.basename(os.path.dirname(os.path.join(self.root, self.paths[index]))) or None


class Subset(Source):
    """Some items of a source."""

    def __init__(self, whole: Source, chosen: NDArray[np.int64]) -> None:
        super().__init__(whole.root, [whole.paths[i] for i in chosen])
        self.whole, self.chosen = whole, chosen
        self.num_ahead = whole.num_ahead

    @cached_property
    def keys(self) -> Keys:
        """Return the keys in the whole source."""
        return self.whole.keys[self.chosen]

    def announce(self, indices: Iterable[int]) -> None:
        """Announce items of the whole source."""
        self.whole.announce(int(self.chosen[index]) for index in indices)

    def read(self, index: int) -> bytes:
        """Read an item from the whole source."""
        return self.whole.read(int(self.chosen[index]))

    def lost(self, index: int) -> str | None:
        """Return what has disappeared with an item of the whole source."""
        return self.whole.lost(int(self.chosen[index]))

    def label(self, index: int) -> str | None:
        """Return the label in the whole source."""
        return self.whole.label(int(self.chosen[index]))

    def stamp(self, index: int) -> tuple[int, int]:
        """Return the stamp in the whole source."""
        return self.whole.stamp(int(self.chosen[index]))


def read_file(path: str) -> bytes:
    """Return the bytes of a file with half the system calls of `Path.read_bytes`; each takes long on a network."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device would never end
            raise OSError("it is not a regular file")
        parts, remaining = [], status.st_size
        while remaining > 0 and (part := os.read(file, remaining)):
            parts.append(part)
            remaining -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(file)


def error_reason(error: Exception) -> str:
    """Return why an item cannot be read, without the number and the path that Python adds to the system's message."""
    if isinstance(error, FileNotFoundError):
        return "the file does not exist"
    return str(getattr(error, "strerror", None) or error)


def raise_with_name(error: Exception, source: Source, index: int) -> NoReturn:
    """Raise an error that came up in reading an item, and is not the item's fault, with the item's name."""
    name = printable(f"{source.paths[index]} of {source.root}")
    if isinstance(error, UserError):
        raise error
    if isinstance(error, MemoryError):
        error.add_note(name)
        raise error
    raise RuntimeError(f"while reading {name}: {type(error).__name__}: {error}") from error


def lost_folder(path: str) -> str | None:
    """Return the folder of a missing file if it is missing or empty too, as when a disk is removed; else None."""
    real = os.path.realpath(path)  # the file that a link points to
    if os.path.exists(real):
        return None
    folder = os.path.dirname(real)
    try:
        with os.scandir(folder) as entries:
            return folder if next(entries, None) is None else None
    except PermissionError:
        return None
    except OSError:
        return folder
