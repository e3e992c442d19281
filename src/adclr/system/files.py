"""Files that are whole or absent, also when the disk is full or the power fails; locks that end with their process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from adclr.config.errors import UserError
from adclr.system.store_urls import url_of

# Windows has other locks, and neither links nor signals as they are used here
LOCKS_EXIST = find_spec("fcntl") is not None
WINDOWS = "adclr does not run on Windows; run it in WSL 2, the Linux of Windows, which `wsl --install` installs"


def write_atomically(path: Path, data: bytes, durable: bool = True) -> None:
    """Write a file that is then there whole or not at all; if `durable`, also after a power cut."""
    with replacing(path) as temporary:
        if durable:
            write_synced(temporary, [data])
        else:
            temporary.write_bytes(data)
    if durable:
        sync(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the path of a temporary file, which then takes the place of a file, or is deleted after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # write(2) does not say it; for rename(2) it is the temporary name
        raise


def write_synced(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a new file that is on the disk when this returns."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for piece in pieces:
            _write_all(handle, piece)
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(handle: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:  # a disk that is nearly full takes a part of it, and fails only at the next
        rest = rest[os.write(handle, rest) :]


def open_no_follow(path: str | Path, flags: int) -> int:
    """Open a file but not what a link leads to: a link in somebody else's run must not make us write elsewhere."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def append(path: Path, data: bytes) -> None:
    """Append all of the data or, if the disk is full, nothing."""
    handle = open_no_follow(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(handle).st_size
        try:
            _write_all(handle, data)
        except OSError:
            with suppress(OSError):
                os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)


def check_system() -> None:
    """Refuse a system without the locks that keep two processes from writing the same files."""
    if not LOCKS_EXIST:
        raise UserError(WINDOWS)


def lock_file(file: IO[Any], wait: bool = False) -> None:
    """Lock an open file; raise BlockingIOError if another process has it, unless told to wait.

    The lock ends with its process, also if that is killed. A file system without locks is taken as it is.
    """
    check_system()
    # not there on Windows
    import fcntl

    if wait:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


@contextmanager
def lock(folder: Path, use: str) -> Iterator[IO[bytes]]:
    """Lock a folder by its file .lock, and give that file; refuse if another process has it for this `use`."""
    check_system()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "ab", opener=open_no_follow) as file:
        try:
            lock_file(file)
        except BlockingIOError:
            raise UserError(f"another process is {use} {folder}; wait for it or stop it") from None
        yield file


def check_writable(path: Path) -> None:
    """Refuse, before any work is done, if a file or folder cannot be written there."""
    url = url_of(path)
    if url is not None:
        raise UserError(f"{url} is in a store, to which only adclr embed and adclr export write; name a path on a disk")
    parent = path
    try:
        while not parent.exists() and parent != parent.parent:
            parent = parent.parent
        writable = os.access(parent, os.W_OK | (os.X_OK if parent.is_dir() else 0))
        if writable and parent != path and not parent.is_dir():
            raise UserError(f"{path} cannot be made, because {parent} is a file; choose another place")
    except OSError as error:
        raise UserError(f"{path} cannot be made ({error.strerror}); choose another place") from None
    if not writable:
        raise UserError(f"{path} cannot be written: there is no permission for {parent}; choose another place")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write a value as a JSON file, whole or not at all."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    """Return the value of a JSON file."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise UserError(f"{path} cannot be read ({reason}); restore it or start another run") from None
