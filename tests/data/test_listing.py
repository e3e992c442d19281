"""The index of a collection: what is sorted on a disk is what is sorted in memory; no damage of it is believed."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

import adclr as package
from adclr.config.parsing import UserError
from adclr.data import listing as listings
from adclr.data import listing_builder, sources
from adclr.data.collection import open_source
from adclr.data.listing import Listing, load_listing
from adclr.data.listing_builder import ListingBuilder, NameColumn, SortedNames, Storage, load_shared, shared_path
from adclr.data.random_draws import key_of
from adclr.data.sources import ImageFolder
from adclr.training import launch
from test_collection import write_tar
from tiny import TINY

ARRAYS = ("names", "ends", "keys", "places", "labels", "label_ends", "facts", "problems", "fingerprint")


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Collections of a few images are handled as those of millions are; the folder of the local cache."""
    monkeypatch.setenv("ADCLR_LOCAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "PROGRESS_EVERY", 4)
    monkeypatch.setattr(sources, "SORTED_AT_ONCE", 5)
    for name, value in (("IN_MEMORY", 30), ("NAMES_AT_ONCE", 3), ("BLOCK", 40)):
        monkeypatch.setattr(listing_builder, name, value)
    monkeypatch.setattr(listings, "MAPPED", 150)
    monkeypatch.setattr(listings, "NAMES_AT_ONCE", 4)
    return tmp_path / "cache"


def create(root: Path, names: list[str]) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def odd_names(seed: int) -> list[str]:
    """Paths whose order is easily got wrong: a dot or a hyphen sorts before the slash, bytes that are no text."""
    rng = random.Random(seed)
    parts = ["a", "a.b", "a-b", "a b", "ab", "B", "é", "漢", "\U0001f600", "\udcff", "\udc80x", "new\nline", "A"]
    folders = ["/".join(rng.choices(parts, k=rng.randint(0, 3))) for _ in range(8)]
    names = {f"{rng.choice(folders)}/{''.join(rng.choices(parts, k=2))}{rng.randint(0, 99)}.png" for _ in range(90)}
    return sorted(name.lstrip("/") for name in names)


@pytest.mark.parametrize("seed", range(6))
def test_names_sorted_on_a_disk_are_in_the_order_of_a_list(seed: int, on_disk: Path, tmp_path: Path) -> None:
    names = odd_names(seed)
    create(tmp_path / "data", names)
    source = ImageFolder(tmp_path / "data")
    assert source.paths == names
    assert [source.paths[i] for i in range(-len(names), len(names))] == names + names
    assert source.paths[3:40:7] == names[3:40:7]
    with pytest.raises(IndexError):
        source.paths[len(names)]
    assert source.keys.tolist() == [key_of(name) for name in names]
    plain = sources.Files([str(tmp_path / "data" / name) for name in names])  # has no index
    assert source.fingerprint() == plain.fingerprint()
    assert source.listing is not None
    assert source.listing.file == shared_path([str(tmp_path / "data")])
    assert sorted(path.suffix for path in (on_disk / "indexes").iterdir()) == [".lock", ".npz"]


@pytest.mark.usefixtures("on_disk")
def test_runs_that_overlap_are_merged() -> None:
    for seed in range(5):
        rng = random.Random(seed)
        names = [f"{rng.randint(0, 999):03d}" for _ in range(200)]
        with Storage([str(seed)]) as storage:
            ordered = SortedNames(storage)
            for first in range(0, 180, 30):
                ordered.add(names[first : first + 30])
            assert [name.decode() for part in ordered.parts(names[180:]) for name in part] == sorted(names)


@pytest.mark.usefixtures("on_disk")
def test_a_kept_index_is_used_while_it_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, index = tmp_path / "data", tmp_path / "run" / "index.npz"
    create(data, names := odd_names(1))
    first = open_source(data, index)
    assert first.listing is not None
    first.listing.save(index)
    assert os.path.samefile(index, shared_path([str(data)]))  # a link: its room is taken once

    def never(*_: object) -> Listing:
        raise AssertionError("it was searched again")

    with monkeypatch.context() as patched:
        patched.setattr(sources, "_search_folder", never)
        for kept in (index, None):
            again = open_source(data, kept)
            assert again.paths == names
            assert isinstance(again.keys.base, np.ndarray), "keys are in memory, not in the file"
            assert again.fingerprint() == first.fingerprint()
        assert open_source(data, index).listing is not None
        before = index.stat().st_ino
        launched = open_source(data, index).listing
        assert launched is not None
        launched.save(index)
        assert index.stat().st_ino == before  # not written again at each start
        time.sleep(0.02)
        create(data, ["zz/new.png"])
        with pytest.raises(AssertionError, match="searched again"):
            open_source(data, index)
    assert open_source(data, index).paths == sorted([*names, "zz/new.png"])
    shared = load_shared([str(data)])
    assert shared is not None
    assert len(shared.names) == len(names) + 1
    assert len(first.paths) == len(names)  # the file that was replaced is still there for those who have it open
    assert list(first.paths) == names


def test_a_place_that_cannot_be_written_is_no_obstacle(
    on_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path / "data", names := odd_names(2))
    on_disk.write_text("a file")
    assert ImageFolder(tmp_path / "data").paths == names
    on_disk.unlink()

    def full(_: Listing, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Listing, "save", full)
    source = ImageFolder(tmp_path / "data")
    assert source.paths == names
    assert source.listing is not None
    assert source.listing.file is None


def damaged(path: Path, name: str) -> None:
    """Change one byte in the middle of an array of an index."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{name}.npy")
        header = info.header_offset
    content = bytearray(path.read_bytes())
    names = int.from_bytes(content[header + 26 : header + 28], "little")
    extra = int.from_bytes(content[header + 28 : header + 30], "little")
    start = header + 30 + names + extra + 128  # behind the header of the array
    content[start + (info.file_size - 128) // 2] ^= 0x15
    path.unlink()  # not through the link
    path.write_bytes(content)


@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize("name", ARRAYS)
def test_a_damaged_index_is_not_used(name: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", {f"{i}.{end}": b"ab" for i in range(40) for end in ("png", "cls")})
    index = tmp_path / "index.npz"
    found = open_source(tmp_path / "0.tar", index)
    assert found.listing is not None
    found.listing.save(index)
    found.listing.file.unlink()  # type: ignore[union-attr]
    assert load_listing(index) is not None
    damaged(index, name)
    again = load_listing(index)
    if name in ("names", "ends"):  # long ones are checked where they are used
        assert again is not None
        with pytest.raises(UserError, match=rf"^index {index} is damaged at image \d+; delete it and begin again$"):
            again.names[:]
        assert again.names[0] == found.paths[0]  # others are as they were
    elif name.startswith("label"):
        assert again is not None
    else:
        assert again is None
        assert open_source(tmp_path / "0.tar", index).paths == found.paths  # it is made anew


@pytest.mark.usefixtures("on_disk")
def test_an_index_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    for name in ("../secret.png", "a/../../secret.png", f"{tmp_path}/secret.png"):
        create(tmp_path / "data", ["fine.png"])
        (tmp_path / "secret.png").write_text("secret")
        with Storage(["x"]) as storage:
            builder = ListingBuilder(storage)
            builder.add([b"fine.png", name.encode()])
            facts = {str(tmp_path / "data"): listings.fact(tmp_path / "data", False)}
            builder.listing(facts, {}).save(tmp_path / "index.npz")
        source = open_source(tmp_path / "data", tmp_path / "index.npz")
        assert len(source) == 2
        assert source.read(0) == b""
        with pytest.raises(UserError, match="is damaged at image 1; delete it"):
            source.read(1)


def test_shards_are_indexed_on_a_disk_as_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shards").mkdir()
    for number, labels in enumerate(([], ["cls"], [])):  # of which only one has labels
        files = {f"{i}.{end}": b"ab" for i in range(number * 10, number * 10 + 10) for end in ["png", *labels]}
        write_tar(tmp_path / "shards" / f"{number}.tar", files)
    plain = open_source(tmp_path / "shards")
    with monkeypatch.context() as patched:
        patched.setenv("ADCLR_LOCAL_CACHE", str(tmp_path / "cache"))
        for name, value in (("IN_MEMORY", 30), ("NAMES_AT_ONCE", 3)):
            patched.setattr(listing_builder, name, value)
        for attempt in ("built", "kept"):
            large = open_source(tmp_path / "shards")
            assert large.paths == plain.paths, attempt
            assert large.keys.tolist() == plain.keys.tolist() == [key_of(f"{i}.png") for i in range(30)]
            assert [large.label(i) for i in range(30)] == [plain.label(i) for i in range(30)]
            assert [large.read(i) for i in range(30)] == [b"ab"] * 30
        assert not large.holds(tmp_path)
        assert large.holds(tmp_path / "shards" / "below")
        write_tar(tmp_path / "shards" / "3.tar", {"5.png": b"c"})  # the name of another: the shard tells them apart
        assert open_source(tmp_path / "shards").keys.tolist() == list(
            map(key_of, open_source(tmp_path / "shards").paths)
        )


BUILD = """
import os, sys, time
from pathlib import Path
from adclr.data import listing_builder, sources
sources.PROGRESS_EVERY = 4
sources.SORTED_AT_ONCE = listing_builder.IN_MEMORY = 5
finish = listing_builder.ListingBuilder.listing
data, begun = map(Path, sys.argv[1:])
def slowly(self, *arguments):
    while len(list(begun.iterdir())) < 2:  # until the other is about to begin too
        time.sleep(0.01)
    time.sleep(0.3)
    print("built")
    return finish(self, *arguments)
listing_builder.ListingBuilder.listing = slowly
(begun / str(os.getpid())).touch()
print(sources.ImageFolder(data).fingerprint())
"""


def test_two_processes_at_once_make_one_index(tmp_path: Path) -> None:
    create(tmp_path / "data", odd_names(3))
    (tmp_path / "begun").mkdir()
    environment = os.environ | {"ADCLR_LOCAL_CACHE": str(tmp_path / "cache")}

    def begin() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", BUILD, str(tmp_path / "data"), str(tmp_path / "begun")]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    first = begin()
    while not list(tmp_path.glob("cache/indexes/*.lock")):  # it has begun
        assert first.poll() is None
        time.sleep(0.01)
    outputs = [process.communicate(timeout=60) for process in (first, begin())]
    lines = [output.split() for output, _ in outputs]
    assert sorted(map(len, lines)) == [1, 2]  # one has built it
    assert {line[-1] for line in lines} == {ImageFolder(tmp_path / "data").fingerprint()}
    assert "another process indexes" in outputs[1][1]


@pytest.mark.usefixtures("on_disk")
def test_a_run_over_a_mapped_index_is_the_same_and_resumes(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(images / "train", tmp_path / "data")
    mapped = package.pretrain(tmp_path / "data", out=tmp_path / "mapped", recipe="adclr_small", **TINY)
    resumed = launch.prepare(None, mapped.path)
    assert resumed.source.listing is not None
    assert resumed.source.listing.file == mapped.path / launch.INDEX
    launch.check_finished(resumed)
    monkeypatch.undo()
    plain = package.pretrain(images / "train", out=tmp_path / "plain", recipe="adclr_small", **TINY)
    assert (mapped.path / "metrics.jsonl").read_text() == (plain.path / "metrics.jsonl").read_text()


def test_names_with_any_bytes_but_their_own_number(tmp_path: Path) -> None:
    with Storage([str(tmp_path)]) as storage:
        column = NameColumn(storage)
        column.append([b"", b"\0\0", b"x"])  # of a member of a shard
        column.append([b"", "\udcff".encode("utf-8", "surrogateescape")])
        names = column.names()
    assert list(names) == [names[i] for i in range(5)] == ["", "\0\0", "x", "", "\udcff"]
