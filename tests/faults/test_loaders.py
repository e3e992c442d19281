"""Threads that read images and are stuck: noticed, replaced once in the same order, or the run ends and says where."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import adclr as package
import lives
from adclr.config.parsing import UserError
from adclr.data import collection
from adclr.data import feed as feeds
from adclr.data.decode import Decoder
from adclr.data.feed import Feed
from adclr.data.sources import ImageFolder
from adclr.data.view_plan import plan_batch
from adclr.system import threads
from adclr.system.threads import StalledError, ThreadPool, wait_for
from tiny import TINY, tiny

CHANGES: dict[str, Any] = {"cache": "off", "num_workers": 2}
# In the process: threads that read one image hang, as on a disk that does not answer, until a file is there.
HANG = """
import os, threading, time, adclr.data.sources as s, adclr.system.threads as w
w.PATIENCE_SECONDS = 2.0
read = s.read_file
def hanging(path):
    if path.endswith({name!r}) and threading.current_thread().name.startswith(("decode", "cache")):
        while not os.path.exists({flag!r}): time.sleep(0.05)
    return read(path)
s.read_file = hanging
"""


def test_a_run_goes_on_when_the_disk_does_with_the_order_kept(images: Path, tmp_path: Path) -> None:
    whole = package.pretrain(images / "train", out=tmp_path / "whole", **(TINY | CHANGES))
    name = sorted((images / "train").rglob("*.png"))[11].name
    flag = tmp_path / "again"
    process = lives.start(images / "train", tmp_path / "run", before=HANG.format(name=name, flag=str(flag)), **CHANGES)
    said = []
    assert process.stderr is not None
    for line in process.stderr:
        said.append(line)
        if "it is tried once more" in line:
            flag.touch()
    code, _, _ = lives.finish(process)
    assert code == 0, said
    assert sum("no image has come for a minute while reading" in line and name in line for line in said) == 1
    assert lives.digest(tmp_path / "run") == lives.digest(whole.path)


@pytest.mark.parametrize("workers", [2, 0])
def test_a_run_ends_when_the_disk_does_not_answer_and_says_which_image(
    images: Path, tmp_path: Path, workers: int
) -> None:
    data = tmp_path / "data"
    shutil.copytree(images / "train", data)
    name = sorted(data.rglob("*.png"))[11].name
    started = time.monotonic()
    before = HANG.format(name=name, flag=str(tmp_path / "never"))
    process = lives.start(data, tmp_path / "run", before=before, **(CHANGES | {"num_workers": workers}))
    code, _, errors = lives.finish(process)
    assert code == 2, errors
    assert time.monotonic() - started < 60  # though a thread still waits
    last = errors.strip().splitlines()[-1]
    assert last.startswith("adclr: no image has come for a minute while reading ")
    assert name in last
    assert last.endswith("twice; check the disk or network it lies on, or remove it")


def test_decoding_into_memory_does_not_wait_for_ever(images: Path, tmp_path: Path) -> None:
    name = sorted((images / "train").rglob("*.png"))[11].name
    before = HANG.format(name=name, flag=str(tmp_path / "never"))
    process = lives.start(images / "train", tmp_path / "run", before=before, num_workers=2)
    code, _, errors = lives.finish(process)
    assert code == 2, errors
    assert "no image has come for a minute; check the disk" in errors


def test_choosing_a_recipe_does_not_wait_for_ever(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, release = ImageFolder(images / "train"), threading.Event()
    monkeypatch.setattr(threads, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(source, "read", lambda _: bytes(release.wait()))
    with pytest.raises(StalledError):
        collection.median_side(source)
    release.set()


def test_no_memory_for_a_moment_costs_nothing_and_for_longer_ends_the_run(
    images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, settings = ImageFolder(images / "train"), tiny()
    orders = [(0, np.arange(i, i + 4)) for i in range(0, 32, 4)]

    def batches(feed: Feed) -> list[bytes]:
        made = feed.batches(iter(orders), lambda e, k, s: plan_batch(settings, e, k, s))
        return [batch.packed.bytes.numpy().tobytes() for batch in made]

    wanted, pack, times = batches(Feed(source, 0, Decoder())), feeds.pack, [0]

    def short(items: Any, pin: bool) -> Any:
        times[0] += 1
        if times[0] in failing:
            raise MemoryError
        return pack(items, pin)

    monkeypatch.setattr(feeds, "pack", short)
    failing = {3}
    assert batches(Feed(source, 3, Decoder())) == wanted
    assert "there is no memory for" in capsys.readouterr().err
    failing, times[0] = set(range(3, 99)), 0
    with pytest.raises(UserError, match=r"no memory for .*, twice; lower data\.num_workers"):
        batches(Feed(source, 3, Decoder()))
    assert not any(thread.name.startswith(("decode", "assemble")) for thread in threading.enumerate())


def test_slow_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PATIENCE_SECONDS", 0.5)
    with ThreadPool(2, "slow") as slow:
        futures = [slow.submit(time.sleep, 0.2) for _ in range(10)]
        wait_for(futures[-1], slow)  # comes after a second
    release = threading.Event()
    waiting = ThreadPool(2, "stuck")
    futures = [waiting.submit(release.wait) for _ in range(4)]
    started = time.monotonic()
    with pytest.raises(StalledError):
        wait_for(futures[0], waiting)
    assert 0.5 < time.monotonic() - started < 2
    waiting.close()  # at once
    assert futures[3].cancelled()
    release.set()


def test_workers_give_results_errors_and_nothing_else() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with ThreadPool(3, "some") as some:
        assert [wait_for(future, some) for future in [some.submit(pow, i, 2) for i in range(20)]] == [
            i * i for i in range(20)
        ]
        with pytest.raises(ZeroDivisionError):
            wait_for(some.submit(fail), some)
        late: Future[None] = some.submit(lambda: (_ for _ in ()).throw(TimeoutError("of the work")))
        with pytest.raises(TimeoutError, match="of the work"):
            wait_for(late, some)
    assert not any(thread.name.startswith("some") for thread in threading.enumerate())
