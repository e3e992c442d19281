"""Batches do not hang on threads, and unreadable images hang nothing else."""

from __future__ import annotations

import shutil
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from adclr.config.parsing import UserError
from adclr.data import feed as feed_module
from adclr.data.augment import render
from adclr.data.collection import open_source
from adclr.data.decode import Decoder, Pixels
from adclr.data.feed import Batch, Feed
from adclr.data.sources import ImageFolder, Subset
from adclr.data.view_plan import BatchPlan, plan_batch
from adclr.features.reader import ImageReader, center_crop
from tiny import tiny

SETTINGS = tiny()


def planner(epoch: int, keys: np.ndarray, sizes: np.ndarray) -> BatchPlan:
    return plan_batch(SETTINGS, epoch, keys, sizes)


def order(count: int, batch: int = 4) -> list[tuple[int, np.ndarray]]:
    return [(0, np.arange(i, i + batch)) for i in range(0, count - batch + 1, batch)]


def collect(feed: Feed, count: int) -> list[Batch]:
    return list(feed.batches(order(count), planner))


@pytest.fixture
def folder(images: Path, tmp_path: Path) -> Path:
    shutil.copytree(images / "train", tmp_path / "data")
    return tmp_path / "data"


def views(batch: Batch[BatchPlan]) -> list[torch.Tensor]:
    """All that a step is shown of a batch: global crops, local crops, queries."""
    made = render(batch.packed, batch.plan, SETTINGS.data.mean, SETTINGS.data.std)
    assert made.local_crops is not None
    assert made.queries is not None
    return [made.global_crops, made.local_crops, made.queries]


@pytest.mark.parametrize("num_workers", [0, 1, 4, 13])
def test_any_number_of_threads_gives_the_same_views(folder: Path, num_workers: int) -> None:
    source = ImageFolder(folder)
    whole = views(next(Feed(source, 0, Decoder()).batches([(0, np.arange(32))], planner)))
    for number, batch in enumerate(collect(Feed(source, num_workers, Decoder()), 32)):
        part = slice(4 * number, 4 * number + 4)
        crops, local, queries = views(batch)
        assert torch.equal(crops, whole[0][:, part])
        assert torch.equal(local, whole[1][:, part])
        assert torch.equal(queries, whole[2][part])


def test_an_unreadable_image_is_listed_once_and_its_place_filled_by_the_next(folder: Path) -> None:
    source = ImageFolder(folder)
    clean = collect(Feed(source, 0, Decoder()), 32)
    for index in (5, 6):
        (folder / source.paths[index]).write_bytes(b"broken")
    listed: list[tuple[str, str]] = []
    feed = Feed(source, 3, Decoder(), on_unreadable=lambda path, reason: listed.append((path, reason)))
    for _ in range(2):
        actual = collect(feed, 32)
    assert sorted(path for path, _ in listed) == [source.paths[5], source.paths[6]]
    assert all("not an image of a known format" in reason for _, reason in listed)
    size = 3 * 24 * 24
    for number, (a, b) in enumerate(zip(clean, actual, strict=True)):
        assert np.array_equal(a.plan.global_crops.boxes, b.plan.global_crops.boxes)  # the places keep their draws
        if number != 1:
            assert all(map(torch.equal, views(a), views(b)))
    seventh = clean[1].packed.bytes[3 * size :]
    for place in (1, 2, 3):
        assert actual[1].packed.bytes[place * size : (place + 1) * size].equal(seventh)


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


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_how_many_are_bad_is_counted_and_not_only_the_first(folder: Path, tmp_path: Path, num_workers: int) -> None:
    good = ImageFolder(folder).paths[0]
    (folder / "html.png").write_text("<html>")
    (tmp_path / "list.txt").write_text(
        "\n".join([f"data/{good}", "data/html.png", *(f"data/no{i}.png" for i in "abc")])
    )
    listed: list[tuple[str, str]] = []
    feed = Feed(
        open_source(tmp_path / "list.txt"), num_workers, Decoder(), 0.1, on_unreadable=lambda *row: listed.append(row)
    )
    with pytest.raises(UserError, match=r"^4 of 5 images cannot be read, for example data/.*\(.*\); fix them or raise"):
        list(feed.batches([(0, np.arange(5))], planner))
    assert dict(listed) == {
        "data/html.png": "it is not an image of a known format (JPEG, PNG, WEBP, BMP, TIFF, GIF)",
        **{f"data/no{i}.png": "the file does not exist" for i in "abc"},
    }
    assert len(listed) == 4


def test_of_many_images_a_part_is_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ImageFolder(folder)
    for path in source.paths[::2]:
        (folder / path).write_bytes(b"")
    monkeypatch.setattr(feed_module, "SURVEY", 16)
    bad = r"^at least \d+ of 32 images \(\d+ of the 16 that were tried\) cannot be read, for example"
    with pytest.raises(UserError, match=bad):
        collect(Feed(source, 1, Decoder(), max_unreadable=0.1), 32)


def test_a_folder_that_disappears_is_named(folder: Path) -> None:
    source = ImageFolder(folder)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="has disappeared"):
        collect(Feed(source, 2, Decoder()), 32)


def test_an_error_that_is_no_fault_of_a_file_comes_up_with_its_name(folder: Path) -> None:
    source = ImageFolder(folder)
    data = source.read(9)

    def decoder(found: bytes) -> Pixels:
        if found == data:
            raise IndexError("a fault of the program's")
        return Decoder()(found)

    for workers in (0, 3):
        with pytest.raises(RuntimeError, match=rf"while reading {source.paths[9]} of .*: IndexError: a fault") as error:
            collect(Feed(source, workers, decoder, on_unreadable=lambda *_: pytest.fail("listed")), 32)
        assert isinstance(error.value.__cause__, IndexError)
        images = ImageReader(source, decoder, center_crop((8, 8)), torch.device("cpu"), workers)
        with pytest.raises(RuntimeError, match=rf"while reading {source.paths[9]} of .*: IndexError: a fault"):
            list(images.batches([np.arange(32)]))


def test_a_lack_of_memory_is_tried_again_and_named_and_lists_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ImageFolder(folder)
    data, failures = source.read(9), iter([True])

    def decoder(found: bytes) -> Pixels:
        if found == data and next(failures, False):
            raise MemoryError
        return Decoder()(found)

    feed = Feed(source, 3, decoder, on_unreadable=lambda *_: pytest.fail("listed"))
    assert len(collect(feed, 32)) == 8
    assert f"there is no memory for {source.paths[9]} of {folder}; it is tried once more" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["folder", "sub-folder", "list", "emptied", "links", "shard"])
def test_what_disappears_is_named_and_nothing_good_is_listed(folder: Path, tmp_path: Path, way: str) -> None:
    """Of a collection that is there in part, good files would be listed until there are too many."""
    paths, where = ImageFolder(folder).paths, folder
    gone = folder / paths[20].split("/")[0] if way in ("sub-folder", "emptied") else folder
    if way == "list":
        where = tmp_path / "list.txt"
        where.write_text("\n".join(f"data/{path}" for path in paths))
    elif way == "links":
        where = tmp_path / "links"
        where.mkdir()
        for number, path in enumerate(paths):
            (where / f"{number:02d}.png").symlink_to(folder / path)
    elif way == "shard":
        where = tmp_path / "shards"
        where.mkdir()
        for number in range(2):
            with tarfile.open(where / f"{number}.tar", "w") as archive:
                for path in paths[number::2]:
                    archive.add(folder / path, path)
        gone = where / "1.tar"
    source = open_source(where)
    assert len(source) == 32
    listed: list[str] = []
    feed = Feed(source, 2, Decoder(), on_unreadable=lambda path, _: listed.append(path))
    collect(feed, 32)
    if way == "shard":
        gone.unlink()
    else:
        shutil.rmtree(gone)
    if way == "emptied":
        gone.mkdir()
    with pytest.raises(UserError, match=rf"^{gone}.* has disappeared; restore it"):
        collect(feed, 32)
    images = ImageReader(source, Decoder(), center_crop((8, 8)), torch.device("cpu"), 2)
    with pytest.raises(UserError, match=rf"^{gone}.* has disappeared; restore it"):
        list(images.batches([np.arange(32)]))
    assert not listed


def test_a_single_file_that_is_gone_is_listed(folder: Path, tmp_path: Path) -> None:
    source = ImageFolder(folder)
    (folder / source.paths[3]).unlink()
    listed: list[str] = []
    for actual in (source, Subset(source, np.arange(32))):
        collect(Feed(actual, 2, Decoder(), on_unreadable=lambda path, _: listed.append(path)), 32)
    assert listed == [source.paths[3]] * 2
    shutil.move(folder, tmp_path / "elsewhere")
    assert Subset(source, np.arange(5, 9)).lost(0) == str(folder)


@pytest.mark.parametrize(("on_gpu", "count"), [(True, 1), (False, 2)])
def test_one_thread_plans_where_nothing_must_be_waited_for(folder: Path, on_gpu: bool, count: int) -> None:
    feed = Feed(ImageFolder(folder), 2, Decoder())
    feed.keep("ram", torch.device("cpu"))
    assert feed.store is not None
    feed.store.on_gpu = on_gpu
    seen = set()

    def slow(epoch: int, keys: np.ndarray, sizes: np.ndarray) -> BatchPlan:
        seen.add(threading.get_ident())
        time.sleep(0.05)  # time for another thread, if there is one, to take the next batch
        return planner(epoch, keys, sizes)

    assert len(list(feed.batches(order(len(feed.source)), slow))) > 2
    assert len(seen) == count


def test_stopping_early_leaves_no_thread(folder: Path) -> None:
    before = threading.active_count()
    batches = Feed(ImageFolder(folder), 4, Decoder()).batches(order(32), planner)
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before
