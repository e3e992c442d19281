"""Parquet, Arrow and WebDataset files, on a disk and in the Hugging Face cache: rows, names, labels, damage."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import adclr as package
from adclr.config.parsing import UserError
from adclr.data.collection import open_source
from adclr.data.listing import Listing
from adclr.data.random_draws import key_of
from adclr.data.sets.classes import open_labeled
from adclr.data.sources import ImageFolder, tables, tar_shards
from adclr.data.sources.tables import Tables
from adclr.training import launch
from tiny import TINY


@pytest.fixture(scope="module")
def folder(images: Path) -> ImageFolder:
    return ImageFolder(images / "train")


def rows_of(folder: ImageFolder, count: int = 10) -> list[dict[str, Any]]:
    return [{"bytes": folder.read(i), "path": folder.paths[i]} for i in range(count)]


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path, **options)
    return path


def test_rows_are_read_in_any_order(folder: ImageFolder, tmp_path: Path) -> None:
    rows = rows_of(folder)
    path = write(tmp_path / "x.parquet", {"image": rows, "label": list(range(10))}, row_group_size=3)
    source = open_source(path)
    order = [9, 0, 5, 3, 3, 8, 1]
    assert [source.read(i) for i in order] == [folder.read(i) for i in order]
    assert list(source.paths) == folder.paths[:10]
    assert source.keys.tolist() == folder.keys[:10].tolist()
    assert [source.label(i) for i in (0, 9)] == ["0", "9"]
    assert not source.holds(tmp_path / "other")


def test_names_where_there_is_no_path(folder: ImageFolder, tmp_path: Path) -> None:
    data = [folder.read(i) for i in range(4)]
    write(tmp_path / "a" / "0.parquet", {"jpg": data, "text": ["x"] * 4})
    write(tmp_path / "a" / "1.parquet", {"jpg": data, "text": ["x"] * 4})
    source = open_source(tmp_path / "a")
    assert source.paths[3:5] == ["0.parquet/000000003", "1.parquet/000000000"]
    assert source.label(0) is None
    write(tmp_path / "twice.parquet", {"image": [{"bytes": d, "path": "same.png"} for d in data]})
    assert open_source(tmp_path / "twice.parquet").paths[0] == "twice.parquet/000000000"
    beside = write(tmp_path / "beside.parquet", {"image": data, "file_name": [f"cat/{i}.png" for i in range(4)]})
    source = open_source(beside)
    assert source.paths[2] == "cat/2.png"
    assert source.label(2) == "cat"


def test_row_groups_in_memory_are_bounded(folder: ImageFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", {"image": rows_of(folder, 30)}, row_group_size=2)
    monkeypatch.setattr(tables.machine, "host_memory", lambda: 5 * 5 * len(folder.read(0)))  # of which a fifth is used
    source = open_source(path)
    assert isinstance(source, Tables)
    for index in [*range(30), *range(30)]:
        assert source.read(index) == folder.read(index)
        assert len(source._decoded) <= 4
    seen: list[bytes] = []
    threads = [threading.Thread(target=lambda i=i: seen.append(source.read(i % 30))) for i in range(60)]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == sorted(folder.read(i % 30) for i in range(60))


def test_what_cannot_be_read(folder: ImageFolder, tmp_path: Path) -> None:
    (tmp_path / "no.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(UserError, match=r"no\.parquet cannot be read as a table"):
        open_source(tmp_path / "no.parquet")
    (tmp_path / "no.arrow").write_bytes(b"ARROW1")
    with pytest.raises(UserError, match=r"no\.arrow cannot be read as a table"):
        open_source(tmp_path / "no.arrow")
    with pytest.raises(UserError, match=r"text\.parquet has no column of images, of text"):
        open_source(write(tmp_path / "text.parquet", {"text": ["a"]}))
    with pytest.raises(UserError, match="several columns of bytes"):
        open_source(write(tmp_path / "two.parquet", {"left": [b"a"], "right": [b"b"]}))
    with pytest.raises(UserError, match="has no rows"):
        open_source(write(tmp_path / "empty.parquet", {"image": pa.array([], pa.binary())}))
    path = write(tmp_path / "hole.parquet", {"image": [{"bytes": folder.read(0), "path": None}, None]})
    source = open_source(path)
    assert source.read(0) == folder.read(0)
    with pytest.raises(OSError, match="no image here"):
        source.read(1)
    data = bytearray(write(tmp_path / "bad.parquet", {"image": rows_of(folder)}).read_bytes())
    data[20:400] = bytes(380)
    (tmp_path / "bad.parquet").write_bytes(data)
    try:  # damage that shows itself when rows are indexed is refused, else the row is unreadable
        damaged = open_source(tmp_path / "bad.parquet")
    except UserError as error:
        assert "bad.parquet" in str(error)  # noqa: PT017
    else:
        with pytest.raises(OSError, match="damaged"):
            damaged.read(0)


def write_web(path: Path, samples: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in samples.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def test_labels_of_web_datasets(folder: ImageFolder, tmp_path: Path) -> None:
    image = folder.read(0)
    samples = {
        **{"a.jpg": image, "a.cls": b"3\n"},
        **{"b.png": image, "b.json": json.dumps({"label": "owl", "caption": "x"}).encode()},
        **{"c.jpg": image, "c.json": b"{broken", "d.jpg": image, "d.json": b'{"cls": 0}'},
        **{"e.jpg": image, "e.json": b'{"label": 1}', "e.cls": b"2", "f.jpg": image, "f.json": b'[1, {"label": 1}]'},
    }
    write_web(tmp_path / "x.tar", samples)
    source = open_source(tmp_path / "x.tar")
    labels = {path.rpartition("/")[2]: source.label(i) for i, path in enumerate(source.paths)}
    assert labels == {"a.jpg": "3", "b.png": "owl", "c.jpg": None, "d.jpg": "0", "e.jpg": "2", "f.jpg": None}


def test_evaluations_say_where_a_label_is_missing(folder: ImageFolder, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    write_web(tmp_path / "shards" / "x.tar", {f"{i}.png": folder.read(i) for i in range(9)})
    with pytest.raises(UserError, match=r"x\.tar/\d\.png has no label in a \.cls or \.json beside it"):
        open_labeled(tmp_path / "shards")
    write(tmp_path / "tables" / "x.parquet", {"image": [folder.read(i) for i in range(9)]})
    with pytest.raises(UserError, match=r"x\.parquet/\d{9} has no label; the data set needs a column of classes"):
        open_labeled(tmp_path / "tables")


def test_web_datasets_are_probed_by_their_labels(images: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        own = ImageFolder(images / split)
        (tmp_path / split).mkdir()
        samples: dict[str, bytes] = {}
        for i, path in enumerate(own.paths):
            stem = path.rpartition("/")[2].removesuffix(".png")
            samples |= {f"{stem}.png": own.read(i), f"{stem}.json": json.dumps({"label": own.label(i)}).encode()}
        write_web(tmp_path / split / "0.tar", samples)
    assert open_labeled(tmp_path).classes == open_labeled(images).classes
    run = package.pretrain(tmp_path / "train", out=tmp_path / "run", recipe="adclr_small", **TINY)
    scores = [
        package.evaluate("knn", weights=str(run.path), data=str(data), device="cpu") for data in (tmp_path, images)
    ]
    assert scores[0] == scores[1]


def test_keys_of_members_do_not_depend_on_the_shard(folder: ImageFolder, tmp_path: Path) -> None:
    write_web(tmp_path / "0.tar", {"./a/1.png": folder.read(0), "b/2.png": folder.read(1)})
    write_web(tmp_path / "1.tar", {"c/3.png": folder.read(2)})
    source = open_source(tmp_path)
    assert source.keys.tolist() == [key_of("a/1.png"), key_of("b/2.png"), key_of("c/3.png")]
    write_web(tmp_path / "2.tar", {"c/3.png": folder.read(3)})  # one name twice: the shard tells them apart
    assert len(set(open_source(tmp_path).keys.tolist())) == 4
    assert open_source(tmp_path).keys.tolist() == [key_of(path) for path in open_source(tmp_path).paths]


def test_a_run_of_version_0_1_over_shards_keeps_its_keys(
    folder: ImageFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its index has no word of keys; it resumes with those of SHARD/MEMBER, though a new run has others."""
    write_web(tmp_path / "x.tar", {path: folder.read(i) for i, path in enumerate(folder.paths)})
    monkeypatch.setattr(tar_shards, "member_name", lambda name, _: name)
    monkeypatch.setattr(Listing, "_arrays", _arrays_of_version_0_1)
    settings = {"recipe": "adclr_small", **TINY}
    old = package.pretrain(tmp_path / "x.tar", out=tmp_path / "old", **settings)
    monkeypatch.undo()
    resumed = launch.prepare(None, old.path)
    assert resumed.source.keys.tolist() == [key_of(path) for path in resumed.source.paths]
    launch.check_finished(resumed)
    assert open_source(tmp_path / "x.tar").fingerprint() == folder.fingerprint() != resumed.source.fingerprint()


def _arrays_of_version_0_1(listing: Listing) -> dict[str, Any]:
    texts = {"names": listing.names, "labels": listing.labels}
    encoded = {name: "\0".join(some).encode("utf-8", "surrogateescape") for name, some in texts.items()}
    others = {name: json.dumps(getattr(listing, name)).encode() for name in ("facts", "problems")}
    bytes_ = {name: np.frombuffer(text, np.uint8) for name, text in (encoded | others).items()}
    return bytes_ | {"places": listing.places}


@pytest.fixture
def cached(folder: ImageFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The caches of a machine on which `datasets` has loaded Parquet files, and the Hub was asked for others."""
    import datasets

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    kinds = sorted({str(folder.label(i)) for i in range(len(folder))})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=kinds)})
    rows = {"image": rows_of(folder, 20), "label": [folder.label(i) for i in range(20)]}
    data = datasets.Dataset.from_dict(rows, features=features)
    data.to_parquet(tmp_path / "all.parquet")
    files = {split: str(tmp_path / "all.parquet") for split in ("train", "validation")}
    datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "home" / "datasets"))
    snapshot = tmp_path / "home/hub/datasets--someone--Birds/snapshots/abc"
    for split, count in (("train", len(folder)), ("test", 16)):
        for part in range(2):
            indices = range(part, count, 2)
            own = [{"bytes": folder.read(i), "path": folder.paths[i]} for i in indices]
            columns = {"image": own, "label": [folder.label(i) for i in indices]}
            write(snapshot / "data" / f"{split}-{part:05d}-of-00002.parquet", columns)
    return tmp_path


def test_data_sets_in_the_hugging_face_cache(folder: ImageFolder, cached: Path) -> None:
    source = open_source("hf:parquet/train")
    assert [source.read(i) for i in range(20)] == [folder.read(i) for i in range(20)]
    assert [source.label(i) for i in range(20)] == [folder.label(i) for i in range(20)]
    assert source.keys.tolist() == folder.keys[:20].tolist()
    hub = open_source("hf:someone/Birds/train")
    assert sorted(hub.paths) == folder.paths
    assert hub.label(list(hub.paths).index(folder.paths[4])) == folder.label(4)
    labeled = open_labeled("hf:someone/Birds")
    assert (len(labeled.train.source), len(labeled.val.source)) == (32, 16)
    assert len(open_labeled("hf:parquet").val.source) == 20
    with pytest.raises(UserError, match=r"hf:parquet holds splits; name one of them, such as hf:parquet/train"):
        open_source("hf:parquet")
    with pytest.raises(UserError, match="hf:someone/Birds/dev is not among the splits of someone/Birds, test, train"):
        open_source("hf:someone/Birds/dev")
    with pytest.raises(UserError, match=r"^hf: names no data set; write hf:NAME"):
        open_source("hf:")
    with pytest.raises(UserError, match=r"hf:nobody/nothing is neither .* nor in the Hugging Face cache"):
        open_source("hf:nobody/nothing")
    assert cached.exists()
