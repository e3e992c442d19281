"""Batches do not hang on threads, and unreadable images hang nothing else."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from adclr.config import UserError
from adclr.decode import Decoder
from adclr.feed import Batch, Feed
from adclr.sources import ImageFolder
from adclr.views import Plan, plan
from tiny import tiny

SETTINGS = tiny()


def planner(epoch: int, keys: np.ndarray, sizes: np.ndarray) -> Plan:
    return plan(SETTINGS, epoch, keys, sizes)


def order(count: int, batch: int = 4) -> list[tuple[int, np.ndarray]]:
    return [(0, np.arange(i, i + batch)) for i in range(0, count - batch + 1, batch)]


def collect(feed: Feed, count: int) -> list[Batch]:
    return list(feed.batches(order(count), planner))


@pytest.fixture
def folder(images: Path, tmp_path: Path) -> Path:
    shutil.copytree(images / "train", tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.parametrize("num_workers", [1, 4, 13])
def test_any_number_of_threads_gives_the_same_batches(folder: Path, num_workers: int) -> None:
    source = ImageFolder(folder)
    for a, b in zip(
        collect(Feed(source, 0, Decoder()), 32), collect(Feed(source, num_workers, Decoder()), 32), strict=True
    ):
        assert a.packed.bytes.equal(b.packed.bytes)
        assert np.array_equal(a.plan.global_crops.boxes, b.plan.global_crops.boxes)


def test_an_unreadable_image_is_listed_once_and_its_place_filled_by_the_next(folder: Path) -> None:
    source = ImageFolder(folder)
    clean = collect(Feed(source, 0, Decoder()), 32)
    for index in (5, 6):
        (folder / source.paths[index]).write_bytes(b"broken")
    listed: list[tuple[str, str]] = []
    feed = Feed(source, 3, Decoder(), on_unreadable=lambda path, reason: listed.append((path, reason)))
    for _ in range(2):
        found = collect(feed, 32)
    assert sorted(path for path, _ in listed) == [source.paths[5], source.paths[6]]
    assert all("not an image of a known format" in reason for _, reason in listed)
    size = 3 * 24 * 24
    for number, (a, b) in enumerate(zip(clean, found, strict=True)):
        assert np.array_equal(a.plan.global_crops.boxes, b.plan.global_crops.boxes)  # the places keep their draws
        if number != 1:
            assert a.packed.bytes.equal(b.packed.bytes)
    seventh = clean[1].packed.bytes[3 * size :]
    for place in (1, 2, 3):
        assert found[1].packed.bytes[place * size : (place + 1) * size].equal(seventh)


def test_too_many_unreadable_images_stop_the_run(folder: Path) -> None:
    source = ImageFolder(folder)
    for path in source.paths[:8]:
        (folder / path).write_bytes(b"")
    with pytest.raises(UserError, match="raise max_unreadable"):
        collect(Feed(source, 2, Decoder(), max_unreadable=0.1), 32)
    for path in source.paths:
        (folder / path).write_bytes(b"")
    with pytest.raises(UserError, match="none of the 32 images"):
        collect(Feed(source, 0, Decoder()), 32)


def test_a_folder_that_disappears_is_named(folder: Path) -> None:
    source = ImageFolder(folder)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="has disappeared"):
        collect(Feed(source, 2, Decoder()), 32)


def test_stopping_early_leaves_no_thread(folder: Path) -> None:
    before = threading.active_count()
    batches = Feed(ImageFolder(folder), 4, Decoder()).batches(order(32), planner)
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before
