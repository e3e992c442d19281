"""Workers that embed one collection together, are killed, and leave every image once."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

import adclr as package
from adclr.config.parsing import UserError
from adclr.features import embedding, embedding_files
from adclr.features.embedding_workers import SharedParts
from adclr.system.files import write_json
from tiny import TINY


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    return package.pretrain(images / "train", out=out, recipe="adclr_small", **TINY).path


def write_images(folder: Path, count: int) -> list[str]:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), np.uint8)).save(folder / f"{number:04d}.png")
    return [f"{number:04d}.png" for number in range(count)]


def check_complete(out: Path, expected: list[str], alone: Path) -> dict[str, Any]:
    """Every image is there once, in order, with the vector that one command gives it; nothing else is left."""
    about: dict[str, Any] = json.loads((out / "_embed.json").read_text())
    assert about["finished"]
    parts = sorted(out.glob("part-*.parquet"))
    assert [parquet.read_metadata(part).num_rows for part in parts] == [part["rows"] for part in about["parts"]]
    table, reference = parquet.read_table(parts), parquet.read_table(sorted(alone.glob("part-*.parquet")))
    assert table["path"].to_pylist() == expected
    vectors, theirs = (np.stack(one["vector"].to_numpy()) for one in (table, reference))
    np.testing.assert_allclose(vectors, theirs, atol=1e-5)
    assert {path.name for path in out.iterdir()} == {"_embed.json", *(part.name for part in parts)}
    return about


def parts_of(out: Path, count: int = 40, size: int = 4, overwrite: bool = False, **facts: Any) -> SharedParts:
    return SharedParts(out, "parquet", count, size, {"weights": "w", **facts}, None, overwrite)


def rows_of(parts: SharedParts, number: int) -> list[tuple[str, Any]]:
    return [(f"{index}.png", np.full(3, index, np.float32)) for index in parts.indices(number)]


def test_a_part_has_one_worker_and_is_free_when_that_is_gone(tmp_path: Path) -> None:
    one, two = parts_of(tmp_path / "out"), parts_of(tmp_path / "out")
    with two.open():
        with one.open():
            mine = [next(taken) for taken in [iter(one.missing())] for _ in range(3)]
            theirs = [next(taken) for taken in [iter(two.missing())] for _ in range(2)]
            assert (mine, theirs) == ([0, 1, 2], [3, 4])
            one.write(1, rows_of(one, 1), {})
            assert 1 not in set(two.missing())
        taken = set(two.missing())  # the first one has gone with parts 0 and 2 unfinished
        assert taken == {0, 2}
        for number in {*taken, *theirs, *range(5, 10)}:
            two.write(number, rows_of(two, number), {})
        assert not two.wait()
        about = two.finish({})
    late = parts_of(tmp_path / "out")
    assert late.finished() == about
    assert about["rows"] == 40
    assert parquet.read_table(sorted((tmp_path / "out").glob("*.parquet")))["path"].to_pylist() == [
        f"{index}.png" for index in range(40)
    ]


def test_workers_that_end_one_after_the_other_leave_only_the_parts(tmp_path: Path) -> None:
    """Two work together; a third one begins while the first is about to finish."""
    one, two, late = (parts_of(tmp_path / "out") for _ in range(3))
    with one.open(), two.open():
        for number in one.missing():
            one.write(number, rows_of(one, number), {})
        about = one.finish({})
        with late.open():
            assert not list(late.missing())
            assert not late.wait()
            assert late.finish({}) == about
        assert two.finish({}) == about
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"_embed.json", *(f"part-{number:06d}.parquet" for number in range(10))}


def test_a_command_that_comes_while_the_last_worker_clears_away_disturbs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_come(path: Path, value: Any) -> None:
        write_json(path, value)
        if value.get("finished"):
            assert parts_of(tmp_path / "out").finished() is not None

    one = parts_of(tmp_path / "out")
    with one.open():
        for number in one.missing():
            one.write(number, rows_of(one, number), {})
        monkeypatch.setattr(embedding_files, "write_json", write_and_come)
        assert one.finish({})["rows"] == 40


def test_a_folder_is_ours_before_its_description_is_there(tmp_path: Path) -> None:
    """Another worker looks, or the first one is killed, while that makes locks and writes the description."""
    out = tmp_path / "out"
    for name in ("_done", "_claims"):
        (out / name).mkdir(parents=True)
    for name in (".lock", ".setup", "._embed.json.17.tmp"):
        (out / name).touch()
    parts = parts_of(out)
    assert parts.finished() is None
    with parts.open():
        assert len(list(parts.missing())) == 10
    (tmp_path / "other" / "_claims").mkdir(parents=True)
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(UserError, match="was not written by adclr embed"):
        parts_of(tmp_path / "other").finished()


def test_a_folder_is_ours_whose_first_worker_begins_while_another_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    first, iterdir = parts_of(tmp_path / "out"), Path.iterdir

    def begin_and_list(folder: Path) -> Iterator[Path]:
        monkeypatch.undo()
        with first.open():
            number = next(iter(first.missing()))
            first.write(number, rows_of(first, number), {})
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", begin_and_list)
    assert parts_of(tmp_path / "out").finished() is None


def test_who_may_write_to_a_folder(tmp_path: Path, run: Path, images: Path) -> None:
    with parts_of(tmp_path / "out").open():
        with (
            pytest.raises(UserError, match=r"workers are making .* with size_=None where 2"),
            parts_of(tmp_path / "out", size_=2).open(),
        ):
            pass
        alone = embedding.Parts(tmp_path / "out", "parquet", 40, 4, {"weights": "w"})
        with pytest.raises(UserError, match="another process is writing"), alone.open():
            pass
    with (
        alone.open(),
        pytest.raises(UserError, match="without shared=true is writing"),
        parts_of(tmp_path / "out").open(),
    ):
        pass
    with pytest.raises(UserError, match="is one file; give the name of a folder"):
        package.embed(run, images / "val", tmp_path / "x.parquet", shared=True, device="cpu")
    with pytest.raises(UserError, match="is in a store; leave out shared=true"):
        package.embed(run, images / "val", "s3://bucket/x", shared=True, device="cpu")


def test_one_worker_is_enough(tmp_path: Path, run: Path) -> None:
    names = write_images(tmp_path / "images", 30)
    settings = {"part_size": 7, "device": "cpu"}
    package.embed(run, tmp_path / "images", tmp_path / "alone", **settings)
    package.embed(run, tmp_path / "images", tmp_path / "shared", shared=True, **settings)
    check_complete(tmp_path / "shared", names, tmp_path / "alone")


def _work(run: Path, data: Path, out: Path) -> None:
    import torch

    torch.set_num_threads(1)
    package.embed(run, data, out, shared=True, part_size=20, batch_size=1, num_workers=1, device="cpu")


@pytest.mark.full
def test_killed_workers_lose_and_repeat_no_image(tmp_path: Path, run: Path) -> None:
    """10 workers over 2000 images; one after the other is killed at random, and others come for them."""
    names = write_images(tmp_path / "images", 2000)
    package.embed(run, tmp_path / "images", tmp_path / "alone", part_size=20, device="cpu")
    context = multiprocessing.get_context("forkserver")  # which has torch imported, and no threads
    context.set_forkserver_preload(["adclr.features.embedding"])
    choose, out, workers, num_killed = random.Random(0), tmp_path / "out", list[BaseProcess](), 0

    def start() -> None:
        worker = context.Process(target=_work, args=(run, tmp_path / "images", out))
        worker.start()
        workers.append(worker)

    def num_done() -> int:
        return len(list((out / "_done").glob("*.json")))

    for _ in range(10):
        start()
    end = time.monotonic() + 400
    while any(worker.is_alive() for worker in workers):
        assert time.monotonic() < end
        before = num_done()
        while num_done() < before + 6 and any(worker.is_alive() for worker in workers):
            time.sleep(0.01)
        alive = [worker for worker in workers if worker.is_alive()]
        if num_killed < 10 and len(alive) > 1 and num_done():
            worker = choose.choice(alive)
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            num_killed += 1
            if num_killed % 2:  # some come, some only go
                start()
    for worker in workers:
        worker.join()
    assert num_killed == 10
    assert {worker.exitcode for worker in workers} == {0, -signal.SIGKILL}
    check_complete(out, names, tmp_path / "alone")
