"""What is kept in memory is what would have been decoded, wherever it is kept."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

import adclr as package
from adclr.config.parsing import UserError
from adclr.data import cache
from adclr.data.cache import GIB, FreeMemory, Store
from adclr.data.decode import Decoder, Pixels
from adclr.data.feed import Feed
from adclr.data.sources import ImageFolder
from adclr.system.runs import Run
from tiny import TINY

CPU = torch.device("cpu")
PLENTY = FreeMemory(4 * GIB, 0)


@pytest.fixture
def data(images: Path, tmp_path: Path) -> Path:
    """32 images, three of which cannot be read: two neighbors and the last."""
    folder = tmp_path / "data"
    shutil.copytree(images / "train", folder)
    paths = sorted(folder.rglob("*.png"))
    for path in (paths[5], paths[6], paths[-1]):
        path.write_bytes(b"")
    return folder


def pretrain(data: Path, out: Path, **changes: Any) -> Run:
    return package.pretrain(data, out=out, recipe="adclr_small", **(TINY | changes))


def test_training_is_the_same_with_and_without(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        pretrain(data, tmp_path / "off", cache="off"),
        pretrain(data, tmp_path / "ram", cache="ram"),
        pretrain(data, tmp_path / "none", cache="ram", num_workers=0),
    ]
    monkeypatch.setattr(Store, "on_gpu", True, raising=False)
    monkeypatch.setattr(Store, "__init__", lambda self, packed: setattr(self, "packed", packed))
    runs.append(pretrain(data, tmp_path / "gpu", cache="ram"))  # batches by place, as on a GPU
    runs.append(pretrain(data, tmp_path / "gpu0", cache="ram", num_workers=0))
    for run in runs[1:]:
        assert (run.path / "metrics.jsonl").read_text() == (runs[0].path / "metrics.jsonl").read_text()
        listed = sorted(row["path"] for row in run.rows("quarantine.jsonl"))
        assert listed == sorted(row["path"] for row in runs[0].rows("quarantine.jsonl"))
        assert len(listed) == 3
        assert json.loads((run.path / "provenance.json").read_text())[0]["cache"] == "0.000 GiB"
    assert json.loads((runs[0].path / "provenance.json").read_text())[0]["cache"] is None


def test_a_store_holds_every_image_and_the_next_for_one_that_is_broken(data: Path) -> None:
    plain, stored = (Feed(ImageFolder(data), 3, Decoder()) for _ in range(2))
    decoded = cache.decode_all("auto", stored.read, 32, 3, PLENTY, CPU, show=False)
    assert decoded is not None
    store = decoded.place(CPU)
    for index in range(32):
        assert np.array_equal(store.image(index), plain.image(index))
    batch = store.select(np.array([6, 2, 31]))
    for place, index in enumerate((6, 2, 31)):
        height, width = batch.sizes[place]
        start = batch.offsets[place]
        flat = batch.bytes[start : start + 3 * height * width].numpy()
        assert np.array_equal(flat.reshape(3, height, width), plain.image(index))


@pytest.mark.parametrize(
    ("mode", "size", "room", "place"),
    [
        ("auto", 1, FreeMemory(100, 100), "gpu"),
        ("auto", 16, FreeMemory(100, 100), "gpu"),  # 16 · 1.5 <= a quarter of the GPU
        ("auto", 17, FreeMemory(100, 100), "ram"),
        ("auto", 33, FreeMemory(100, 100), "ram"),
        ("auto", 34, FreeMemory(100, 100), None),  # 34 · 1.5 > half of the memory
        ("auto", 1, FreeMemory(100, 0), "ram"),
        ("ram", 99, FreeMemory(100, 0), "ram"),
        ("gpu", 99, FreeMemory(100, 100), "gpu"),
    ],
)
def test_where_a_collection_is_kept(mode: str, size: float, room: FreeMemory, place: str | None) -> None:
    assert cache.choose_location(mode, size, room) == place


def test_a_collection_that_does_not_fit() -> None:
    with pytest.raises(UserError, match=r"data\.cache=ram needs about 2\.0 GiB and 1\.0 are free"):
        cache.choose_location("ram", 2 * GIB, FreeMemory(GIB, 0))
    with pytest.raises(UserError, match="the run is not on a GPU"):
        cache.decode_all("gpu", lambda index: None, 5, 1, PLENTY, CPU)
    small, large = np.zeros((3, 2, 2), np.uint8), np.zeros((3, 5000, 5000), np.uint8)

    def read(index: int) -> Pixels:  # the guess sees only small ones
        chosen = set(np.linspace(0, 999, cache.SAMPLE).astype(int).tolist())
        return small if index in chosen else large

    assert cache.decode_all("auto", read, 1000, 2, PLENTY, CPU, show=False) is None
    with pytest.raises(UserError, match="do not fit"):
        cache.decode_all("ram", read, 1000, 2, PLENTY, CPU, show=False)
    assert cache.decode_all("off", read, 1000, 2, PLENTY, CPU) is None
    assert cache.decode_all("auto", lambda index: None, 10, 2, PLENTY, CPU) is None  # nothing can be read


def test_an_error_in_a_thread_reaches_the_caller() -> None:
    def read(index: int) -> Pixels:
        if index == 70:
            raise UserError("number 70 is the last straw")
        return np.zeros((3, 2, 2), np.uint8)

    with pytest.raises(UserError, match="number 70"):
        cache.decode_all("ram", read, 100, 2, PLENTY, CPU, show=False)


def test_images_are_kept_in_order_whichever_comes_first() -> None:
    """Of 150, in parts of which the last is short and one has nothing that can be read; earlier ones take longer."""

    def read(index: int) -> Pixels | None:
        time.sleep(2e-3 if index < 40 else 0)
        return None if index % 7 == 3 or 64 <= index < 96 else np.full((3, 1 + index % 3, 2), index, np.uint8)

    decoded = cache.decode_all("ram", read, 150, 5, PLENTY, CPU, show=False)
    assert decoded is not None
    store = decoded.place(CPU)
    for index in range(150):
        there = next(i for i in range(index, 150) if read(i) is not None)
        assert np.array_equal(store.image(index), np.full((3, 1 + there % 3, 2), there, np.uint8))


def test_images_are_decoded_while_something_else_is_done(data: Path) -> None:
    feed, begun, go_on = Feed(ImageFolder(data), 2, Decoder()), Event(), Event()
    read = feed.read

    def wait_and_read(index: int) -> Pixels | None:
        begun.set()
        assert go_on.wait(60)
        return read(index)

    feed.read = wait_and_read  # type: ignore[method-assign]
    with feed.keeping("ram", CPU):
        assert begun.wait(60)  # nothing has asked for an image
        assert feed.store is None
        go_on.set()
    assert feed.store is not None
    assert len(feed.store.packed.sizes) == len(feed.source)


def test_an_error_meanwhile_ends_the_decoding(data: Path) -> None:
    for path in sorted(data.rglob("*.png")):
        for number in range(20):
            shutil.copy(path, path.with_name(f"{path.stem}-{number}.png"))
    feed, before = Feed(ImageFolder(data), 2, Decoder()), threading.active_count()
    read, failed, count = feed.read, Event(), 0

    def slow(index: int) -> Pixels | None:
        nonlocal count
        count += 1
        if count > cache.SAMPLE:
            assert failed.wait(60)
        return read(index)

    def fail() -> None:
        with feed.keeping("ram", CPU):
            threading.Timer(0.2, failed.set).start()
            raise UserError("something else is wrong")

    feed.read = slow  # type: ignore[method-assign]
    with pytest.raises(UserError, match="something else"):
        fail()
    assert feed.store is None
    assert count < len(feed.source) / 2
    for _ in range(100):  # the timer's thread ends when it likes
        if threading.active_count() <= before:
            break
        time.sleep(0.05)
    assert threading.active_count() <= before


def test_an_error_of_the_decoding_is_raised_where_it_was_begun(data: Path) -> None:
    feed = Feed(ImageFolder(data), 2, Decoder())

    def keep() -> None:
        with feed.keeping("gpu", CPU):
            pass

    with pytest.raises(UserError, match="the run is not on a GPU"):
        keep()


def test_larger_images_are_resized_to_a_longest_side(images: Path, tmp_path: Path) -> None:
    source = ImageFolder(images / "train")
    assert Decoder(max_side=24)(source.read(0)).shape == (3, 24, 24)
    assert Decoder(max_side=20)(source.read(0)).shape == (3, 20, 20)
    run = pretrain(images / "train", tmp_path / "run", max_side=18)
    assert run.finished
