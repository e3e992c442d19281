"""Reads and writes files so that they are whole or absent, also when the disk is full or the power fails."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from adclr.config.sections import UserError


def write_atomically(path: Path, data: bytes, durable: bool = True) -> None:
    """The file is there whole or not at all; also after a power cut, unless that is not worth the wait for the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if durable:
            write_synced(temporary, [data])
        else:
            temporary.write_bytes(data)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # which write(2) does not say; of rename(2) it is the temporary name
        raise
    if durable:
        sync(path.parent)


def write_synced(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """A new file, on the disk when this returns."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for piece in pieces:
            _write_all(handle, piece)
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(handle: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:  # a disk that is nearly full takes a part of it, and only then says so
        left = left[os.write(handle, left) :]


def _open_itself(path: str | Path, flags: int) -> int:
    """Never what a link leads to: one in a run that somebody gave away must not make us write elsewhere."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _append(path: Path, data: bytes) -> None:
    """All of it or, if the disk is full, nothing."""
    handle = _open_itself(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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


def check_writable(path: Path) -> None:
    """Says before any work is done that a file or folder could not be made there."""
    parent = path
    try:
        while not parent.exists() and parent != parent.parent:
            parent = parent.parent
        good = os.access(parent, os.W_OK | (os.X_OK if parent.is_dir() else 0))
        if good and parent != path and not parent.is_dir():
            raise UserError(f"{path} cannot be made, for {parent} is a file; choose another place")
    except OSError as error:
        raise UserError(f"{path} cannot be made ({error.strerror}); choose another place") from None
    if not good:
        raise UserError(f"{path} cannot be written: there is no permission for {parent}; choose another place")


def sync(path: Path) -> None:
    """A file, or the names in a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise UserError(f"{path} cannot be read ({reason}); restore it or start another run") from None
