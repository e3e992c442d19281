"""Object stores by fsspec: listing, reading, writing; a request that fails is repeated, and then named.

A connection that breaks is never the fault of an image: it ends a command with `StoreError`, a `UserError`, where an
image that is not there, or is no image, is an `OSError`, which lists it as unreadable. Credentials come from the
environment of each store (`store_urls.SCHEMES`); messages hold no part of a URL that could be one.
"""

from __future__ import annotations

import fnmatch
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from adclr.config.errors import UserError
from adclr.system.optional import not_installed, require
from adclr.system.store_urls import SCHEMES, WRITABLE, conceal, is_remote, join, reveal, scheme_of
from adclr.system.text import one_line
from adclr.system.threads import ThreadPool

CONNECTIONS = 64  # at once, of each process
# A request is tried for at most so long (s). Threads that load images count as stuck after 50 s, so that the sentence
# that names the connection comes first.
PATIENCE_SECONDS = 40.0
FIRST_WAIT, LONGEST_WAIT = 0.2, 8.0  # s; doubled after each failure, of which a random half to a whole is waited
CONNECT_SECONDS, READ_SECONDS = 10, 20  # without an answer, after which a connection counts as broken
DOWN_SECONDS = 10.0  # after a request was given up, in which others are tried once
VERSIONS = (
    *("ETag", "etag", "content_md5", "Content-MD5", "md5Hash", "blob_id", "generation"),
    *("LastModified", "last_modified", "Last-Modified", "updated", "mtime"),
)
T = TypeVar("T")
Item = TypeVar("Item")


class StoreError(UserError):
    """A store does not answer, or refuses; the message names the URL and the reason."""


class StoreFile(NamedTuple):
    """An object of a store, as it was when it was listed."""

    url: str
    size: int  # bytes
    version: int  # 63 bits that change when the object is replaced: a hash of its ETag, or else of its time


_filesystems: dict[str, Any] = {}
_down: dict[str, float] = {}  # when a request was given up, by scheme
_lock = threading.Lock()


def _filesystem(url: str) -> Any:
    """Return the fsspec file system of a URL; one for each scheme and process."""
    name = scheme_of(url)
    with _lock:
        if name not in _filesystems:
            _filesystems[name] = _open(name)
        return _filesystems[name]


def _open(name: str) -> Any:
    scheme = SCHEMES[name]
    try:
        require(scheme.package, "remote", f"{name}://")
    except UserError:
        raise not_installed(scheme.package, scheme.install, f"{name}://") from None
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if name == "s3":
        # repeated here, not there, so that there is one rule; an object is one request, its size being known
        options["config_kwargs"] = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "max_pool_connections": 2 * CONNECTIONS,
            "retries": {"total_max_attempts": 1},
        }
        options["max_concurrency"] = 1
    elif name in ("http", "https"):
        timeout = require("aiohttp", "remote", f"{name}://").ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS
        )
        options["client_kwargs"] = {"timeout": timeout}
    opened = require("fsspec", "remote", f"{name}://").filesystem(name, **options)
    if name == "s3":
        opened.retries = 1
    return opened


def _try_again(url: str, call: Callable[[], T]) -> T:
    """Return the result of a call; repeat it with growing waits while its connection breaks, then raise `StoreError`.

    A missing object is a `FileNotFoundError` at once, a refusal a `StoreError` at once.
    """
    end, wait, tries = time.monotonic() + PATIENCE_SECONDS, FIRST_WAIT, 0
    while True:
        try:
            return call()
        except (UserError, MemoryError):
            raise
        except Exception as error:  # each store has its own kinds, not all of them are `OSError`
            tries += 1
            if type(error).__name__ == "ParamValidationError":  # of botocore, which has not even asked
                raise UserError(f"{url} names no bucket; check the URL") from None
            status = _status(error)
            if status in (404, 410):
                raise FileNotFoundError(2, "the object does not exist", url) from None
            if status in (401, 403):
                where = SCHEMES[scheme_of(url)].credentials
                raise StoreError(f"{url} may not be read or written; its credentials come from {where}") from None
            if time.monotonic() + wait > end or _is_down(url):
                _down[scheme_of(url)] = time.monotonic()
                reason = _reason(error)
                raise StoreError(
                    f"{url} cannot be reached ({reason}; {tries} tries); check the "
                    "network or the store, and run the same command again"
                ) from None
        time.sleep(wait * random.uniform(0.5, 1.0))
        wait = min(2 * wait, LONGEST_WAIT)


def _is_down(url: str) -> bool:
    """Return whether another request has just been given up, so that those that wait behind it end too."""
    return time.monotonic() - _down.get(scheme_of(url), -DOWN_SECONDS) < DOWN_SECONDS


def _status(error: BaseException) -> int | None:
    """Return the HTTP status behind an error, if any: fsspec calls every error of a HEAD request a missing file."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        codes = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
        for status in (codes, getattr(cause, "status", None), getattr(cause, "status_code", None)):
            if isinstance(status, int):
                return status
        if cause.__cause__ is None and isinstance(cause, FileNotFoundError):
            return 404
        if isinstance(cause, PermissionError) or type(cause).__name__ in (
            "NoCredentialsError",
            "DefaultCredentialsError",
        ):
            return 403
        cause = cause.__cause__
    return None


def _reason(error: Exception) -> str:
    """Return the message of an error without what could be a credential, in one line."""
    if is_remote(str(error)) and isinstance(error.__cause__, Exception):  # the URL alone says nothing
        error = error.__cause__
    return conceal(one_line(error, 150)).partition("?")[0].rstrip(".")


def _file(url: str, info: dict[str, Any]) -> StoreFile:
    size = info.get("size")
    if size is None:
        raise StoreError(f"{url} has no known size, so that it cannot be read in parts; copy it to a disk")
    version = next((f"{info[name]}" for name in VERSIONS if info.get(name)), "")
    digest = blake2b(version.encode(), digest_size=8).digest()
    return StoreFile(url, int(size), int.from_bytes(digest, "big") >> 1)


def stat(url: str) -> StoreFile:
    """Return size and version of an object."""
    return _try_again(url, lambda: _file(url, _filesystem(url).info(reveal(url))))


def exists(url: str) -> bool:
    """Return whether there is an object of this name, or one below it."""
    try:
        return bool(_try_again(url, lambda: _filesystem(url).info(reveal(url))))
    except FileNotFoundError:
        return bool(_list_folder(url))


def _list_folder(url: str) -> list[dict[str, Any]]:
    """Return what is directly in a folder; nothing if it does not exist.

    Not by fsspec's `find`, `walk`, `glob` and `exists`, which take a connection that breaks for an empty folder.
    """
    try:
        entries: list[dict[str, Any]] = _try_again(
            url, lambda: _filesystem(url).ls(reveal(f"{url.rstrip('/')}/"), detail=True)
        )
    except (FileNotFoundError, NotADirectoryError):
        return []
    return entries


def list_files(url: str, below: bool = True) -> list[StoreFile]:
    """Return the objects below a URL, or only those directly in it, sorted; none if there are none."""
    root = f"{url.rstrip('/')}/"
    start = str(_filesystem(url)._strip_protocol(reveal(root))).rstrip("/") + "/"
    if below and scheme_of(url) in WRITABLE:  # these list all objects of a prefix, a thousand in a request
        try:
            objects: dict[str, Any] = _try_again(url, lambda: _filesystem(url).find(reveal(root), detail=True))
        except FileNotFoundError:
            return []
        entries = [info | {"name": name} for name, info in objects.items()]
    else:
        entries = _list_folder(url)
    files, folders = [], []
    for info in entries:
        name = str(info["name"])
        if not name.startswith(start) or not name[len(start) :].strip("/"):
            continue
        inside = root + name[len(start) :]
        if info.get("type", "file") == "file" and not name.endswith("/"):
            files.append(_file(inside, info))
        elif below and info.get("type") == "directory":
            folders.append(inside)
    return sorted(files + [file for folder in folders for file in list_files(folder)])


def match_files(pattern: str) -> list[StoreFile]:
    """Return the objects that a pattern with * or [...] in its parts names, sorted."""
    parts = pattern.split("/")
    fixed = next(n for n, part in enumerate(parts) if re.search(r"[*\[]", part))
    files = list_files("/".join(parts[:fixed]), below=fixed < len(parts) - 1)
    split = ((file, file.url.split("/")) for file in files)
    return [file for file, names in split if len(names) == len(parts) and all(map(fnmatch.fnmatchcase, names, parts))]


def read(file: StoreFile, start: int = 0, length: int | None = None) -> bytes:
    """Return the bytes of an object or of a part of it; an answer that is too short counts as a broken connection."""
    url, whole = file.url, length is None or (start, length) == (0, file.size)
    count = file.size if length is None else length
    if not count:
        return b""

    def fetch() -> bytes:
        limits = {} if whole else {"start": start, "end": start + count}
        data: bytes = _filesystem(url).cat_file(reveal(url), **limits)
        if not whole and len(data) == file.size > count:  # a server that knows no ranges
            data = data[start : start + count]
        if len(data) != count:
            now = _file(url, _filesystem(url).info(reveal(url)))
            if now != file:
                raise StoreError(f"{url} was replaced while it was read; run the same command again")
            raise ConnectionError(f"it ended after {len(data)} of {count} bytes")
        return data

    return _try_again(url, fetch)


def in_parallel(call: Callable[[Item], T], items: Sequence[Item]) -> list[T]:
    """Return the results of calls that wait for a store, many at once, in order."""
    with ThreadPool(min(CONNECTIONS, max(1, len(items))), "store") as pool:
        return [future.result() for future in [pool.submit(call, item) for item in items]]


def check_writable(url: str) -> None:
    """Refuse a store to which nothing can be written."""
    if scheme_of(url) not in WRITABLE:
        names = ", ".join(f"{name}://" for name in WRITABLE)
        raise UserError(f"{url} cannot be written to; stores that can are {names}")
    _filesystem(url)


def upload(folder: Path, names: Iterable[str], url: str) -> None:
    """Write files of a folder below a URL, in this order; each is there whole or not at all."""

    def put(name: str) -> None:
        _filesystem(url).put_file(str(folder / name), reveal(join(url, name)))

    for name in names:
        try:
            _try_again(join(url, name), partial(put, name))
        except FileNotFoundError:
            raise UserError(
                f"{join(url, name)} cannot be written, for its bucket does not exist; make it, or choose another --out"
            ) from None


def delete(url: str) -> None:
    """Delete an object; one that is not there is fine."""
    with suppress(FileNotFoundError):
        _try_again(url, lambda: _filesystem(url).rm_file(reveal(url)))
