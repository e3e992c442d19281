"""What to read, behind one interface; here a folder and a list of files (see also `shards` and `huggingface`).

Sources know names, keys, bytes and labels; pixels are `decode`'s. An item's key is a hash of its name, so a collection
is the same wherever it lies.
"""

from __future__ import annotations

import json
import os
import stat
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from adclr.config.sections import UserError
from adclr.data.draws import Words, key_of
from adclr.system.progress import Tally
from adclr.system.text import printable

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
TOLD = 1000  # images after which progress is told, also within one folder
NO_PLACES = np.zeros((0, 3), np.int64)


class Source(Protocol):
    root: Path  # what the user named
    paths: Sequence[str]  # the name of each item
    listing: Listing | None  # what is worth keeping of the search for them

    @property
    def keys(self) -> Words: ...
    def __len__(self) -> int: ...
    def read(self, index: int) -> bytes: ...
    def label(self, index: int) -> str | None: ...
    def fingerprint(self) -> str: ...
    def lost(self, index: int) -> str | None: ...
    def holds(self, folder: str | Path) -> bool: ...
    def stamp(self, index: int) -> tuple[int, int]: ...


class Items:
    """What all sources share."""

    def __init__(self, root: Path, paths: Sequence[str], listing: Listing | None = None) -> None:
        self.root, self.paths, self.listing = root, paths, listing

    @cached_property
    def keys(self) -> Words:
        return np.fromiter((key_of(path) for path in self.paths), np.uint64, len(self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def label(self, index: int) -> str | None:
        """The first folder of the item's name, where there is one; nothing but a score ever asks."""
        first, slash, _ = self.paths[index].partition("/")
        return first if slash else None

    def fingerprint(self) -> str:
        """A hash of all keys: the same collection, wherever it lies."""
        return blake2b(np.sort(self.keys).tobytes(), digest_size=16).hexdigest()

    def file(self, index: int) -> str:
        """The file that an item lies in."""
        return os.path.join(self.root, self.paths[index])

    def read(self, index: int) -> bytes:
        return read_file(self.file(index))

    def lost(self, index: int) -> str | None:
        """What has gone away with an item that cannot be read: the collection or a folder; None if it is alone."""
        return lost_folder(self.file(index)) if os.path.exists(self.root) else str(self.root)

    def stamp(self, index: int) -> tuple[int, int]:
        """Returns the bytes of an item and when it was modified (ns); (-1, 0) of a file that is not there."""
        try:
            status = os.stat(self.file(index))
        except OSError:
            return -1, 0
        return status.st_size, status.st_mtime_ns

    def holds(self, folder: str | Path) -> bool:
        """Returns whether images of the collection lie in this folder, or are searched for in it."""
        folders = {os.path.dirname(self.file(index)) for index in range(len(self))}
        return os.path.realpath(folder) in {os.path.realpath(path) for path in folders}


class ImageFolder(Items):
    """Every image below a folder, in the order of its relative paths.

    Hidden files and folders are passed over; a folder or file reached by two links is read once.
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
        assert self.listing is not None
        return is_searched(folder, self.listing.facts)


class FileList(Items):
    """A text file with a path on each line, relative to the file's folder or absolute, and a label behind a tab."""

    def __init__(self, file: str | Path) -> None:
        file = Path(file)
        try:
            text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
        except OSError as error:
            raise UserError(f"list {file} cannot be read ({error.strerror}); check the path") from None
        if "\0" in text:
            raise UserError(f"list {file} is not text in UTF-8; write it as such")
        rows = [line.rstrip("\r").partition("\t") for line in text.split("\n") if line.strip()]
        self.labels = {path.strip(): label.strip() for path, _, label in rows}
        if not self.labels:
            raise UserError(f"list {file} names no image; write one path on each line")
        super().__init__(file, list(self.labels))

    def file(self, index: int) -> str:
        return os.path.join(self.root.parent, self.paths[index])

    def label(self, index: int) -> str | None:
        """What stands behind the tab; else the first folder of a relative path, the last of an absolute one."""
        path = self.paths[index]
        if self.labels[path]:
            return self.labels[path]
        if os.path.isabs(path):
            return os.path.basename(os.path.dirname(path)) or None
        first, slash, _ = path.removeprefix("./").partition("/")
        return first if slash else None


class Files(Items):
    """Image files named one by one, shown by what their names have beyond the folder of all; a label is a folder."""

    def __init__(self, paths: Sequence[str]) -> None:
        full = [os.path.abspath(path) for path in paths]
        root = os.path.commonpath([os.path.dirname(path) for path in full])
        super().__init__(Path(root), [os.path.relpath(path, root) for path in full])

    def label(self, index: int) -> str | None:
        return os.path.basename(os.path.dirname(os.path.join(self.root, self.paths[index]))) or None


class Subset(Items):
    """Some items of a source."""

    def __init__(self, whole: Source, chosen: NDArray[np.int64]) -> None:
        super().__init__(whole.root, [whole.paths[i] for i in chosen])
        self.whole, self.chosen = whole, chosen

    def read(self, index: int) -> bytes:
        return self.whole.read(int(self.chosen[index]))

    def lost(self, index: int) -> str | None:
        return self.whole.lost(int(self.chosen[index]))

    def label(self, index: int) -> str | None:
        return self.whole.label(int(self.chosen[index]))

    def stamp(self, index: int) -> tuple[int, int]:
        return self.whole.stamp(int(self.chosen[index]))


def is_searched(folder: str | Path, searched: Iterable[str | Path]) -> bool:
    """Returns whether a folder, which need not exist yet, is one of these or lies below one; a hidden one is not."""
    known, path = {os.path.realpath(one) for one in searched}, Path(os.path.realpath(folder))
    for one in (path, *path.parents):
        if str(one) in known:
            return True
        if one.name.startswith("."):
            return False
    return False


def read_file(path: str) -> bytes:
    """The bytes of a file in half the system calls of `Path.read_bytes`, each of which counts on a network."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device would never end
            raise OSError("it is not a regular file")
        parts, wanted = [], status.st_size
        while wanted > 0 and (part := os.read(file, wanted)):
            parts.append(part)
            wanted -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(file)


def reason_of(error: Exception) -> str:
    """Why an item cannot be read, without the number and the path that Python puts beside the system's words."""
    if isinstance(error, FileNotFoundError):
        return "the file does not exist"
    return str(getattr(error, "strerror", None) or error)


def fail(error: Exception, source: Source, index: int) -> NoReturn:
    """Passes on what came up in reading an item and is not the item's fault, with its name."""
    name = printable(f"{source.paths[index]} of {source.root}")
    if isinstance(error, UserError):
        raise error
    if isinstance(error, MemoryError):
        error.add_note(name)
        raise error
    raise RuntimeError(f"while reading {name}: {type(error).__name__}: {error}") from error


def lost_folder(path: str) -> str | None:
    """The folder of a file that is not there, if it is gone or empty too, as when a disk is taken out; else None."""
    real = os.path.realpath(path)  # where the file lies that a link leads to
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
    """Relative paths, with '/', of all images below `root`, sorted; perhaps none."""
    try:
        if not root.exists():
            raise UserError(f"folder {root} does not exist; check the path")
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; give the folder that holds the images")
    except OSError as error:
        raise UserError(f"folder {root} cannot be read ({error.strerror}); check the path") from None
    found: list[str] = []
    links: dict[str, str] = {}  # files that links lead to, and the first name of each
    facts: Facts = {}
    problems: dict[str, str] = {}
    seen: set[tuple[int, int]] = set()
    waiting = [""]
    with Tally("indexing", "images") as tally:
        while waiting:
            below = waiting.pop()
            here = root / below
            status = here.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            facts[os.path.abspath(here)] = fact(here, False)  # before it is read, so that no change is missed
            folders = []
            try:
                with os.scandir(here) as entries:
                    for entry in entries:
                        path = f"{below}/{entry.name}" if below else entry.name
                        kind = _kind(entry)
                        if kind == "folder":
                            folders.append(path)
                        elif kind == "link":
                            file = os.path.realpath(entry.path)
                            links[file] = min(path, links.get(file, path))
                        elif kind == "file":
                            found.append(path)
                        elif kind == "dangling":
                            there = os.path.abspath(entry.path)
                            problems[there] = f"a link to {os.readlink(there)}, which is not there"
                        if len(found) - tally.count >= TOLD:
                            tally.add(len(found) - tally.count)
            except PermissionError:
                raise UserError(f"folder {here} may not be read; change its permissions") from None
            waiting += sorted(folders)  # so that of two links the same one is followed wherever the collection lies
    if links:
        own = {os.path.join(_real(root, os.path.dirname(path)), os.path.basename(path)) for path in found}
        found += [path for file, path in links.items() if file not in own]
    return Listing(sorted(found), facts, NO_PLACES, [], problems)


def _kind(entry: os.DirEntry[str]) -> Literal["folder", "file", "link", "dangling"] | None:
    """What an entry of a folder is to a search for images; None for nothing."""
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


@lru_cache(maxsize=2**16)
def _real(root: Path, folder: str) -> str:
    return os.path.realpath(root / folder)


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


def load_listing(path: Path) -> Listing | None:
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
