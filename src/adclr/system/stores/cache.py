"""The local cache of object stores: parts of objects as files in one folder, of a limited size, shared by processes.

A file is named by a hash of the URL, size and version (ETag) of an object and of the part of it, so that a replaced
object is another name. It ends with its length and a checksum, which are checked when it is read: a file that a full
disk or a power cut has spoiled is deleted and fetched again. It appears whole or not at all, and is fetched by one
process, while others that want it wait. The files that have not been used for the longest time are deleted first.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from adclr.config.errors import UserError
from adclr.system.machine import GIB
from adclr.system.store_urls import is_remote

FOLDER_VARIABLE, SIZE_VARIABLE = "ADCLR_LOCAL_CACHE", "ADCLR_LOCAL_CACHE_GIB"
DEFAULT_GIB = 20.0
MAGIC = b"adclr\0\x01\0"
TRAILER = len(MAGIC) + 4 + 8  # bytes: the magic number, the checksum, the length
SLOTS = 1024  # lock files, each for the parts whose names begin the same
ROOM = 0.9  # of the limit that is left when files are deleted, so that this is rare
USED_AGAIN = 600.0  # s after which a file that is read counts as used anew
LARGE = 2**20  # bytes above which a file is checked once by each process, not each time a part of it is read


class LocalCache:
    """`cache.read(name, start, length, fetch)` returns bytes of a part, from its file or from `fetch()`."""

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder, self.limit = folder, limit  # bytes
        self._checked: set[str] = set()
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / "locks").mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the local cache {folder} cannot be written ({error.strerror}); set data.local_cache or "
                f"{FOLDER_VARIABLE} to another folder, or {SIZE_VARIABLE}=0 for none"
            ) from None

    def read(self, name: str, size: int, start: int, length: int, fetch: Callable[[], bytes]) -> bytes:
        """Return `length` bytes from `start` on of a part of `size` bytes; if it is not there, fetch and keep it."""
        data = self.look_up(name, size, start, length)
        if data is not None:
            return data
        with self.locked(f"{int(name[:8], 16) % SLOTS:04d}"):
            data = self.look_up(name, size, start, length)  # another process has fetched it meanwhile
            if data is not None:
                return data
            whole = fetch()
            self._keep(name, whole)
        return whole[start : start + length]

    def look_up(self, name: str, size: int, start: int, length: int) -> bytes | None:
        """Return bytes of a part, or None if its file is missing or damaged; a damaged one is deleted."""
        path = self._path(name)
        try:
            with open(path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                if status.st_size == size + TRAILER and self._is_whole(name, file.fileno(), size):
                    if time.time() - status.st_mtime > USED_AGAIN:
                        os.utime(file.fileno())
                    return os.pread(file.fileno(), length, start)
            path.unlink(missing_ok=True)
        except OSError:
            pass
        return None

    def _is_whole(self, name: str, file: int, size: int) -> bool:
        if size > LARGE and name in self._checked:
            return True
        data = os.pread(file, size + TRAILER, 0)
        if data[size:] != _trailer(memoryview(data)[:size]):
            return False
        if size > LARGE:
            self._checked.add(name)
        return True

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    def _keep(self, name: str, data: bytes) -> None:
        """Write a part; a disk that does not take it is no error, since the part is in memory."""
        size = len(data) + TRAILER
        if size > self.limit:
            return
        path = self._path(name)
        temporary = path.with_name(f".{name}.{os.getpid()}.{threading.get_ident()}.tmp")
        with suppress(OSError), self.locked("size"):  # held while it is written, so that the limit holds at any time
            used = self._used()
            if used + size > self.limit:
                used = self._make_room(size)
            path.parent.mkdir(exist_ok=True)
            self._note(used + size)
            try:
                with open(temporary, "wb", buffering=0) as file:
                    rest = memoryview(data + _trailer(data))
                    while rest:
                        rest = rest[file.write(rest) :]
                os.replace(temporary, path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise

    def _used(self) -> int:
        """Return the bytes of all files, by the note of the process that has last written one, or by counting."""
        try:
            return int((self.folder / "size").read_text())
        except (OSError, ValueError):
            return sum(size for _, size, _ in self._files())

    def _note(self, used: int) -> None:
        (self.folder / "size").write_text(f"{used}")

    def _make_room(self, size: int) -> int:
        """Delete the files that were not used for the longest time; return how many bytes are left in use."""
        files = sorted(self._files())
        used = sum(count for _, count, _ in files)
        for _, count, path in files:
            if used + size <= ROOM * self.limit or used == 0:
                break
            path.unlink(missing_ok=True)
            used -= count
        return used

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield (time of last use, bytes, path) of all files; leftovers of killed processes are deleted."""
        for folder in self.folder.glob("[0-9a-f][0-9a-f]"):
            for path in folder.iterdir():
                with suppress(OSError):
                    if path.name.startswith("."):
                        path.unlink()
                    else:
                        status = path.stat()
                        yield status.st_mtime, status.st_size, path

    @contextmanager
    def locked(self, slot: str) -> Iterator[None]:
        """Exclude other threads and processes; the lock of a process that is killed ends with it."""
        with open(self.folder / "locks" / slot, "ab") as file:
            with suppress(OSError):  # a file system without locks: two may fetch the same
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def part_name(url: str, size: int, version: int, start: int, length: int) -> str:
    """Return the name of a part of an object in the cache."""
    return blake2b(f"{url}\n{size}\n{version}\n{start}\n{length}".encode(), digest_size=16).hexdigest()


def _trailer(data: bytes | memoryview) -> bytes:
    return MAGIC + zlib.crc32(data).to_bytes(4, "little") + len(data).to_bytes(8, "little")


def cache_folder() -> Path:
    """Return the folder of the local cache where no setting names another."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adclr"


_settings: tuple[str | None, float | None] = None, None  # of the run in this process


def configure(folder: str | None, gib: float | None) -> None:
    """Set folder and size (GiB) of the local cache of this process; None: by the environment."""
    global _settings
    if folder is not None and is_remote(folder):
        raise UserError(f"data.local_cache={folder} is a store; name a folder on a disk of this machine")
    _settings = folder, gib


def local_cache() -> LocalCache | None:
    """Return the local cache of this process; None if its size is 0."""
    _, gib = _settings
    if gib is None:
        text = os.environ.get(SIZE_VARIABLE, "")
        try:
            gib = float(text) if text else DEFAULT_GIB
        except ValueError:
            raise UserError(f"{SIZE_VARIABLE}={text} is not a number of GiB; set it to such as 20, or to 0") from None
    if not gib > 0:
        return None
    return LocalCache(current_folder(), gib * GIB)


def current_folder() -> Path:
    """Return the folder of the local cache of this process."""
    return cache_folder() if _settings[0] is None else Path(_settings[0])
