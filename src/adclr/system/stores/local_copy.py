"""Copies of folders of a store in the local cache, for data that is read from files: labels of pixels and of objects.

A copy is named by a hash of the names, sizes and versions of all its objects, so that a data set that has changed is
another copy. It is made by one process, while others wait, and stays while a process that uses it lives. All copies
together may take as many bytes as the rest of the cache; those not used for the longest time are deleted first.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path

from adclr.config.errors import UserError
from adclr.system import stores
from adclr.system.machine import GIB
from adclr.system.progress import ProgressLine
from adclr.system.store_urls import base_name
from adclr.system.stores import StoreFile
from adclr.system.stores.cache import FOLDER_VARIABLE, SIZE_VARIABLE, LocalCache, local_cache
from adclr.system.stores.mirror import PIECE

_held: dict[str, int] = {}  # open lock files of the copies that this process uses, by name of the copy
_lock = threading.Lock()


def local_folder(url: str) -> Path:
    """Return the copy of all objects below a URL. It is made if there is none, and stays while this process lives."""
    url = url.rstrip("/")
    files = stores.list_files(url)
    if not files:
        raise UserError(f"{url} does not exist or holds nothing; check the URL")
    names = [_relative_name(file, url) for file in files]
    cache, size = local_cache(), sum(file.size for file in files)
    if cache is None or size > cache.limit:
        limit = 0 if cache is None else cache.limit / GIB
        raise UserError(
            f"{url} holds {size / GIB:.3g} GiB, which are copied to the local cache of {limit:.3g} GiB; set "
            f"{SIZE_VARIABLE} to more, or copy them to a disk"
        )
    facts = json.dumps([url, *((name, file.size, file.version) for name, file in zip(names, files, strict=True))])
    name = blake2b(facts.encode(), digest_size=16).hexdigest()
    folder = _copies(cache) / name / (base_name(url) or "data")
    with _lock:
        if name not in _held:
            _held[name] = _hold(cache, name, partial(_copy, cache, url, dict(zip(names, files, strict=True)), folder))
    with suppress(OSError):
        os.utime(_marker(cache, name))
    return folder


def _copies(cache: LocalCache) -> Path:
    return cache.folder / "copies"


def _marker(cache: LocalCache, name: str) -> Path:
    """Return the file that is there when a copy is complete; it holds its size in bytes."""
    return _copies(cache) / f"{name}.size"


def _open_lock(cache: LocalCache, name: str) -> int:
    return os.open(cache.folder / "locks" / f"copy-{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock_or_go_on(handle: int, operation: int) -> None:
    with suppress(OSError):  # a file system without locks: two may fetch the same
        fcntl.flock(handle, operation)


def _hold(cache: LocalCache, name: str, copy: partial[None]) -> int:
    """Return an open lock file that keeps a complete copy from being deleted, and make the copy if there is none."""
    handle = _open_lock(cache, name)
    try:
        while True:
            _lock_or_go_on(handle, fcntl.LOCK_EX)
            if not _marker(cache, name).exists():
                copy()
            _lock_or_go_on(handle, fcntl.LOCK_SH)  # another process may lock it in between, and delete the copy
            if _marker(cache, name).exists():
                return handle
    except BaseException:
        os.close(handle)
        raise


def _copy(cache: LocalCache, url: str, files: dict[str, StoreFile], folder: Path) -> None:
    """Fetch the objects that are not there yet: a file that is there is whole."""
    size = sum(file.size for file in files.values())
    name = folder.parent.name
    try:
        with cache.locked("copies"):  # one process at a time deletes copies
            _make_room(cache, name, size)
        missing = [(file, folder / path) for path, file in files.items() if not (folder / path).is_file()]
        with ProgressLine(f"copying {base_name(url)}", len(missing)) as line:
            done = 0
            for start in range(0, len(missing), stores.CONNECTIONS):
                batch = missing[start : start + stores.CONNECTIONS]
                stores.in_parallel(lambda pair: _fetch(*pair), batch)
                done += len(batch)
                line.move(done)
        _marker(cache, name).write_text(f"{size}\n")
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"{url} cannot be copied to {folder} ({reason}); set {FOLDER_VARIABLE} to a folder with room"
        ) from None


def _fetch(file: StoreFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as target:
        for start in range(0, file.size, PIECE):
            target.write(stores.read(file, start, min(PIECE, file.size - start)))
    os.replace(temporary, path)


def _make_room(cache: LocalCache, name: str, size: int) -> None:
    """Delete copies that no process uses, the one not used for the longest time first, until there is room."""
    _copies(cache).mkdir(exist_ok=True)
    others = [path for path in _copies(cache).iterdir() if path.is_dir() and path.name != name]
    sizes = {path: _size(cache, path) for path in others}
    used = sum(sizes.values())
    for path in sorted(others, key=lambda path: _last_use(cache, path)):
        if used + size <= cache.limit:
            break
        handle = _open_lock(cache, path.name)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # in use
        else:
            _marker(cache, path.name).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)
            used -= sizes[path]
        finally:
            os.close(handle)


def _size(cache: LocalCache, path: Path) -> int:
    """Return the bytes of a copy: as noted, or of its files if it is not complete."""
    try:
        return int(_marker(cache, path.name).read_text())
    except (OSError, ValueError):
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _last_use(cache: LocalCache, path: Path) -> float:
    """Return when a copy was last used; 0 if it is not complete."""
    try:
        return _marker(cache, path.name).stat().st_mtime
    except OSError:
        return 0.0


def _relative_name(file: StoreFile, url: str) -> str:
    """Return the path of an object below the URL; refuse one that would lead out of the folder."""
    name = file.url.removeprefix(f"{url}/")
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise UserError(f"{url} holds an object called {name!r}, which is no name of a file below a folder; rename it")
    return name
