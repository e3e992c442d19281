"""The local cache of stores: whole files only, within its size, one fetch for several processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from adclr.config.parsing import UserError
from adclr.system.stores import cache as store_cache
from adclr.system.stores.cache import TRAILER, LocalCache, local_cache, part_name


def name(number: int, version: int = 0) -> str:
    return part_name(f"s3://b/{number}", 100, version, 0, 100)


def content(number: int) -> bytes:
    return bytes([number % 256]) * 100


def never() -> bytes:
    raise AssertionError("it was fetched again")


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("[0-9a-f][0-9a-f]/*"))


def test_a_part_is_fetched_once_and_read_in_pieces(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path, 10**6)
    assert cache.read(name(1), 100, 10, 20, lambda: content(1)) == content(1)[10:30]
    again = LocalCache(tmp_path, 10**6)
    assert again.read(name(1), 100, 90, 10, never) == content(1)[90:]
    assert again.read(name(1, version=1), 100, 0, 100, lambda: content(2)) == content(2)  # replaced: another ETag


@pytest.mark.parametrize("damage", ["cut", "altered", "empty"])
def test_a_damaged_file_is_fetched_again(tmp_path: Path, damage: str) -> None:
    cache = LocalCache(tmp_path, 10**6)
    cache.read(name(1), 100, 0, 100, lambda: content(1))
    (file,) = tmp_path.glob("[0-9a-f][0-9a-f]/*")
    data = file.read_bytes()
    file.write_bytes({"cut": data[:50], "altered": b"x" + data[1:], "empty": b""}[damage])
    assert LocalCache(tmp_path, 10**6).read(name(1), 100, 0, 100, lambda: content(1)) == content(1)
    assert LocalCache(tmp_path, 10**6).read(name(1), 100, 0, 100, never) == content(1)


def test_its_size_is_never_exceeded_and_what_was_used_last_stays(tmp_path: Path) -> None:
    limit = 10 * (100 + TRAILER)
    cache = LocalCache(tmp_path, limit)
    for number in range(30):
        cache.read(name(number), 100, 0, 100, lambda number=number: content(number))  # type: ignore[misc]
        assert used(tmp_path) <= limit
        for path in tmp_path.glob("[0-9a-f][0-9a-f]/*"):  # every file an hour older
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 3600))
        cache.read(name(0), 100, 0, 1, never)
    cache.read(name(29), 100, 0, 1, never)
    too_large = LocalCache(tmp_path / "small", 50)
    assert too_large.read(name(1), 100, 0, 100, lambda: content(1)) == content(1)
    assert used(tmp_path / "small") == 0


def _read_all(folder: Path, log: Path, start: float) -> None:
    cache = LocalCache(folder, 10**6)

    def fetch(number: int) -> bytes:
        with open(log, "a") as file:
            file.write(f"{number}\n")
        time.sleep(0.02)
        return content(number)

    time.sleep(max(0.0, start - time.time()))
    for number in range(10):
        assert cache.read(name(number), 100, 0, 100, lambda number=number: fetch(number)) == content(number)  # type: ignore[misc]


def test_processes_and_threads_fetch_a_part_once(tmp_path: Path) -> None:
    start = time.time() + 0.5
    arguments = tmp_path / "cache", tmp_path / "log", start
    workers = [multiprocessing.get_context("fork").Process(target=_read_all, args=arguments) for _ in range(3)]
    workers += [threading.Thread(target=_read_all, args=arguments) for _ in range(2)]  # type: ignore[misc]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers[:3]] == [0, 0, 0]
    assert sorted(map(int, (tmp_path / "log").read_text().split())) == list(range(10))


def test_a_killed_process_leaves_nothing_half_written(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path, 5 * (100 + TRAILER))
    cache.read(name(0), 100, 0, 100, lambda: content(0))
    (file,) = tmp_path.glob("[0-9a-f][0-9a-f]/*")
    leftover = file.with_name(f".{file.name}.1.1.tmp")
    leftover.write_bytes(b"half")
    for number in range(1, 9):
        cache.read(name(number), 100, 0, 100, lambda number=number: content(number))  # type: ignore[misc]
    assert not leftover.exists()


def test_where_it_lies_and_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_cache, "_settings", (None, None))
    monkeypatch.setenv("ADCLR_LOCAL_CACHE", str(tmp_path / "here"))
    monkeypatch.setenv("ADCLR_LOCAL_CACHE_GIB", "2")
    cache = local_cache()
    assert cache is not None
    assert (cache.folder, cache.limit) == (tmp_path / "here", 2 * 2**30)
    store_cache.configure(str(tmp_path / "set"), 1.5)
    cache = local_cache()
    assert cache is not None
    assert (cache.folder, cache.limit) == (tmp_path / "set", 1.5 * 2**30)
    store_cache.configure(None, 0)
    assert local_cache() is None
    store_cache.configure(None, None)
    monkeypatch.setenv("ADCLR_LOCAL_CACHE_GIB", "much")
    with pytest.raises(UserError, match="ADCLR_LOCAL_CACHE_GIB=much is not a number"):
        local_cache()
    with pytest.raises(UserError, match="is a store; name a folder"):
        store_cache.configure("s3://b/cache", None)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"the local cache .*/file/x cannot be written"):
        LocalCache(tmp_path / "file" / "x", 100)
