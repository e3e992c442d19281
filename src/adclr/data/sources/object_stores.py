"""Folders and lists of images in an object store; for tar shards and Parquet there see `tar_shards` and `tables`.

Names and keys are those of the same folder or list on a disk, so that a collection trains the same weights from either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from adclr.config.parsing import UserError
from adclr.data.sources import SUFFIXES, Source, label_of, parse_list, read_file, read_list
from adclr.data.sources.store_reader import NUM_AHEAD, StoreReader
from adclr.system import stores
from adclr.system.store_urls import conceal, is_remote, join, parent
from adclr.system.stores import StoreFile

UNKNOWN_BYTES = 2**62  # of a list, whose images are asked for their sizes when they are read


class StoreFolder(Source):
    """Every image below a URL, in the order of their relative paths; hidden names are skipped."""

    num_ahead = NUM_AHEAD

    def __init__(self, url: str, files: Sequence[StoreFile] | None = None) -> None:
        files = stores.list_files(url) if files is None else files
        start = len(url.rstrip("/")) + 1
        images = {file.url[start:]: file for file in files if _is_image(file.url[start:])}
        if not images:
            hint = "; name a list or .tar shards" if url.startswith("http") else ""
            raise UserError(f"{url} holds no image; these count: {' '.join(SUFFIXES)}{hint}")
        names = sorted(images)
        self.files = [images[name] for name in names]
        self.reader = StoreReader(sum(file.size for file in self.files))
        super().__init__(url, names)

    @staticmethod
    def holds_images(url: str, files: Sequence[StoreFile]) -> bool:
        """Return whether any of the objects below a URL counts as an image."""
        return any(_is_image(file.url[len(url.rstrip("/")) + 1 :]) for file in files)

    def file(self, index: int) -> str:
        """Return the URL of an item."""
        return self.files[index].url

    def read(self, index: int) -> bytes:
        """Return the encoded image."""
        return self.reader.read(self.files[index], 0, self.files[index].size)

    def announce(self, indices: Iterable[int]) -> None:
        """Begin to fetch items."""
        for index in indices:
            self.reader.announce(self.files[index], 0, self.files[index].size)

    def stamp(self, index: int) -> tuple[int, int]:
        """Return the size of an item and a number of its version (ETag)."""
        return self.files[index].size, self.files[index].version

    def lost(self, index: int) -> str | None:  # noqa: ARG002
        """Return the folder if nothing is left of it."""
        return None if stores.exists(str(self.root)) else str(self.root)

    def holds(self, folder: str | Path) -> bool:  # noqa: ARG002
        """Return that no folder of this machine is searched for images."""
        return False


def _is_image(name: str) -> bool:
    hidden = any(part.startswith(".") for part in name.split("/"))
    return not hidden and name.lower().endswith(SUFFIXES)


class StoreList(Source):
    """A list of which the file, or an image that it names, is in a store; relative paths are beside the list."""

    num_ahead = NUM_AHEAD

    def __init__(self, file: str, content: bytes) -> None:
        self.labels = {conceal(path): label for path, label in parse_list(file, content).items()}
        self.folder = parent(file) if is_remote(file) else str(Path(file).parent)
        self.reader = StoreReader(UNKNOWN_BYTES)
        self._stats: dict[int, StoreFile | None] = {}  # None: it does not exist
        super().__init__(file if is_remote(file) else Path(file), list(self.labels))

    @cached_property
    def _locations(self) -> list[str]:
        remote = is_remote(self.folder)
        return [
            join(self.folder, name.removeprefix("./")) if remote or is_remote(name) else str(Path(self.folder, name))
            for name in self.paths
        ]

    def file(self, index: int) -> str:
        """Return the path or URL of an item."""
        return self._locations[index]

    def _stat(self, index: int) -> StoreFile:
        """Return size and version of an item in a store; asked for once."""
        if index not in self._stats:
            try:
                self._stats[index] = stores.stat(self.file(index))
            except FileNotFoundError:
                self._stats[index] = None
        file = self._stats[index]
        if file is None:
            raise FileNotFoundError(2, "the object does not exist", self.file(index))
        return file

    def read(self, index: int) -> bytes:
        """Return the encoded image."""
        if not is_remote(self.file(index)):
            return read_file(self.file(index))
        file = self._stat(index)
        return self.reader.read(file, 0, file.size)

    def announce(self, indices: Iterable[int]) -> None:
        """Begin to fetch items in a store."""
        remote = [index for index in indices if is_remote(self.file(index))]
        unknown = [index for index in remote if index not in self._stats]
        if unknown:
            stores.in_parallel(self.stamp, unknown)
        for file in (self._stats[index] for index in remote):
            if file is not None:
                self.reader.announce(file, 0, file.size)

    def stamp(self, index: int) -> tuple[int, int]:
        """Return the size of an item and a number of its version; (-1, 0) if it does not exist."""
        if not is_remote(self.file(index)):
            return super().stamp(index)
        try:
            file = self._stat(index)
        except FileNotFoundError:
            return -1, 0
        return file.size, file.version

    def label(self, index: int) -> str | None:
        """Return the text behind the tab; else a folder of the path."""
        name = self.paths[index]
        return self.labels[name] or label_of(name)

    def lost(self, index: int) -> str | None:
        """Return the folder of an item if nothing is left of it."""
        file = self.file(index)
        if not is_remote(file):
            return super().lost(index)
        return None if stores.exists(parent(file)) else parent(file)

    def holds(self, folder: str | Path) -> bool:
        """Return whether images of this machine are in a folder."""
        local = {str(Path(path).parent) for path in self._locations if not is_remote(path)}
        return str(Path(folder).resolve()) in {str(Path(path).resolve()) for path in local}


def open_list(file: str) -> Source | None:
    """Return a list that needs a store; None for one of files on this machine alone."""
    if is_remote(file):
        stored = stores.stat(file)
        return StoreList(file, stores.read(stored))
    content = read_list(file)
    return StoreList(file, content) if b"://" in content and any(map(is_remote, parse_list(file, content))) else None
