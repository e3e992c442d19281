"""Collections of images behind one interface, `Source`; here a folder or a list, in other files all other kinds.

Sources give names, keys, bytes and labels; `decode` turns bytes into pixels. An item's key is a hash of its name, so a
collection is the same wherever it is stored.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from adclr.config.parsing import UserError
from adclr.data.key_order import examine_keys
from adclr.data.listing import Facts, Listing, fact
from adclr.data.listing_builder import SORTED_AT_ONCE, ListingBuilder, SortedNames, Storage, build_listing
from adclr.data.random_draws import Keys, key_of
from adclr.system.outputs import is_searched
from adclr.system.progress import ProgressCount
from adclr.system.store_urls import is_remote
from adclr.system.text import printable

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
PROGRESS_EVERY = 1000  # images between two updates of the progress, also within one folder


class Source:
    """A collection of images; here of files below a folder, which other sources change."""

    num_ahead = 0  # items that are announced before they are read; of stores only

    def __init__(self, root: Path | str, paths: Sequence[str], listing: Listing | None = None) -> None:
        self.root, self.paths = root, paths  # what the user named (a URL is text); the name of each item
        self.listing = listing  # the index of the collection, where searching it again takes long

    @cached_property
    def keys(self) -> Keys:
        """Return the 64-bit key of each item."""
        if self.listing is not None:
            return self.listing.keys
        return np.fromiter((key_of(path) for path in self.paths), np.uint64, len(self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def label(self, index: int) -> str | None:
        """Return the first folder of the item's name, or None; only evaluations use labels."""
        first, slash, _ = self.paths[index].partition("/")
        return first if slash else None

    def fingerprint(self) -> str:
        """Return a hash of all keys: the same wherever the collection is stored."""
        return examine_keys(self.keys).fingerprint if self.listing is None else self.listing.fingerprint

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


class ImageFolder(Source):
    """Every image below a folder, in the order of its relative paths.

    Hidden files and folders are skipped; a folder or file reached by two links is read once.
    """

    def __init__(self, root: str | Path, listing: Listing | None = None) -> None:
        root = Path(root)
        listing = listing or index_folder(root)
        if not listing.names and listing.problems:
            link, problem = next(iter(listing.problems.items()))
            raise UserError(f"folder {root} holds no image that is there: {link} is {problem}; restore it")
        if not listing.names:
            raise UserError(f"folder {root} holds no image; these count: {' '.join(SUFFIXES)}")
        super().__init__(root, listing.names, listing)

    def holds(self, folder: str | Path) -> bool:
        """Return whether images are searched for in this folder."""
        assert self.listing is not None
        return is_searched(folder, self.listing.facts)


class FileList(Source):
    """A text file with a path on each line, relative to the file's folder or absolute, and a label behind a tab."""

    def __init__(self, file: str | Path) -> None:
        self.labels = parse_list(file, read_list(file))
        self.folder = Path(file).parent
        super().__init__(Path(file), list(self.labels))

    def file(self, index: int) -> str:
        """Return the path of an item."""
        return os.path.join(self.folder, self.paths[index])

    def label(self, index: int) -> str | None:
        """Return the text behind the tab; else the first folder of a relative path, the last of an absolute one."""
        path = self.paths[index]
        return self.labels[path] or label_of(path)


def read_list(file: str | Path) -> bytes:
    """Return the content of a list of images on this machine."""
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UserError(f"list {file} cannot be read ({error.strerror}); check the path") from None


def parse_list(file: str | Path, content: bytes) -> dict[str, str]:
    """Return the label of each path of a list, in order; empty where there is none."""
    text = content.decode("utf-8-sig", errors="surrogateescape")
    if "\0" in text:
        raise UserError(f"list {file} is not text in UTF-8; save it in UTF-8")
    rows = [line.rstrip("\r").partition("\t") for line in text.split("\n") if line.strip()]
    labels = {path.strip(): label.strip() for path, _, label in rows}
    if not labels:
        raise UserError(f"list {file} names no image; write one path on each line")
    return labels


def label_of(path: str) -> str | None:
    """Return the first folder of a relative path, the last of an absolute one or a URL; None if there is none."""
    if os.path.isabs(path) or is_remote(path):
        return os.path.basename(os.path.dirname(path)) or None
    first, slash, _ = path.removeprefix("./").partition("/")
    return first if slash else None


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


def index_folder(root: Path) -> Listing:
    """Index the relative paths, with '/', of all images below `root`, sorted; there may be none."""
    try:
        if not root.exists():
            raise UserError(f"folder {root} does not exist; check the path")
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; give the folder that holds the images")
    except OSError as error:
        raise UserError(f"folder {root} cannot be read ({error.strerror}); check the path") from None
    return build_listing([os.path.abspath(root)], partial(_search_folder, root))


def _search_folder(root: Path, storage: Storage) -> Listing:
    """Index a folder that is there."""
    names: list[str] = []
    sorted_names = SortedNames(storage)
    links: dict[str, str] = {}  # the first name of each file that links point to
    facts: Facts = {}
    problems: dict[str, str] = {}
    visited: set[tuple[int, int]] = set()
    pending = [""]
    with ProgressCount("indexing", "images") as tally:
        while pending:
            relative = pending.pop()
            folder = root / relative
            status = folder.stat()
            if (status.st_dev, status.st_ino) in visited:
                continue
            visited.add((status.st_dev, status.st_ino))
            facts[os.path.abspath(folder)] = fact(folder, False)  # before it is read, so that no change is missed
            subfolders = []
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        path = f"{relative}/{entry.name}" if relative else entry.name
                        kind = _kind(entry)
                        if kind == "folder":
                            subfolders.append(path)
                        elif kind == "link":
                            file = os.path.realpath(entry.path)
                            links[file] = min(path, links.get(file, path))
                        elif kind == "file":
                            names.append(path)
                        elif kind == "dangling":
                            link = os.path.abspath(entry.path)
                            problems[link] = f"a link to {os.readlink(link)}, which is not there"
                        if sorted_names.count + len(names) - tally.count >= PROGRESS_EVERY:
                            tally.add(sorted_names.count + len(names) - tally.count)
                            if len(names) >= SORTED_AT_ONCE:
                                sorted_names.add(names)
                                names = []
            except PermissionError:
                raise UserError(f"folder {folder} may not be read; change its permissions") from None
            pending += sorted(subfolders)  # of two links, the same one is followed wherever the collection is stored
        if links:
            folders = {os.path.realpath(path) for path in facts}
            names += [path for file, path in links.items() if not _is_listed(file, folders)]
        builder = ListingBuilder(storage)
        for part in sorted_names.parts(names):
            builder.add(part)
    return builder.listing(facts, problems)


def _is_listed(file: str, folders: set[str]) -> bool:
    """Return whether a file that links point to lies in a folder that is searched, and counts there as an image."""
    folder, name = os.path.split(file)
    return folder in folders and not name.startswith(".") and name.lower().endswith(SUFFIXES)


def _kind(entry: os.DirEntry[str]) -> Literal["folder", "file", "link", "dangling"] | None:
    """Return what an entry of a folder is to a search for images; None: it is skipped."""
    if entry.name.startswith("."):
        return None
    try:
        if entry.is_dir():
            return "folder"
        if entry.name.lower().endswith(SUFFIXES) and entry.is_file():
            return "link" if entry.is_symlink() else "file"
    except OSError:  # a link to itself, or into a folder that may not be read
        pass
    return "dangling" if entry.is_symlink() and not os.path.exists(entry.path) else None
