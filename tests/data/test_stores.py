"""Images in an S3 store train as those in a folder, whatever the connection does; see also test_store_cache."""

from __future__ import annotations

import os
import shutil
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import adclr as package
from adclr.config.parsing import UserError
from adclr.data import file_stamps
from adclr.data.collection import open_source
from adclr.data.sets.classes import open_labeled
from adclr.data.sources import ImageFolder
from adclr.system import store_cache, stores
from store_server import Server, running
from tiny import TINY, Adclr, words


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as started:
        yield started


@pytest.fixture(autouse=True)
def environment(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ADCLR_LOCAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stores, "_down", {})
    monkeypatch.setattr(stores, "FIRST_WAIT", 0.02)


@pytest.fixture(scope="module")
def folder(images: Path) -> ImageFolder:
    return ImageFolder(images / "train")


@pytest.fixture(scope="module")
def url(server: Server, folder: ImageFolder) -> str:
    assert isinstance(folder.root, Path)
    return server.put_folder(folder.root, "train")


def write_shards(folder: ImageFolder, out: Path, count: int = 3) -> None:
    out.mkdir()
    for number in range(count):
        with tarfile.open(out / f"part-{number}.tar", "w") as archive:
            for path in folder.paths[number::count]:
                archive.add(Path(folder.root) / path, path)


def metrics(run_path: Path) -> str:
    return (run_path / "metrics.jsonl").read_text()


def test_a_folder_in_a_store_is_the_folder(folder: ImageFolder, url: str) -> None:
    source = open_source(url)
    assert source.paths == folder.paths
    assert source.fingerprint() == folder.fingerprint()
    assert [source.read(i) for i in range(len(source))] == [folder.read(i) for i in range(len(folder))]
    assert [source.label(i) for i in range(len(source))] == [folder.label(i) for i in range(len(folder))]
    with pytest.raises(UserError, match="does not exist, or holds nothing"):
        open_source("s3://pictures/nothing")
    with pytest.raises(UserError, match=r"s3://absent/x.tar cannot be read \(the object does not exist\)"):
        open_source("s3://absent/x.tar")


TRAINED = {"recipe": "adclr_small", **TINY, "num_workers": 2}


@pytest.fixture(scope="module")
def expected(folder: ImageFolder, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    run = package.pretrain(folder.root, out=tmp_path_factory.mktemp("local") / "run", **TRAINED)
    return (run.path / "backbone.safetensors").read_bytes()


@pytest.mark.parametrize("cache", ["auto", "off"])
def test_faults_of_the_store_change_no_weight(
    server: Server, url: str, expected: bytes, tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three in ten of all requests fails, in each way a server or a network does."""
    monkeypatch.setenv("ADCLR_LOCAL_CACHE_GIB", "0" if cache == "off" else "1")  # so that each epoch reads again
    with server.faults(rate=0.3, kinds=["500", "503", "truncate", "reset"], seed=1):
        run = package.pretrain(url, out=tmp_path / "run", **TRAINED, cache="off")
        counts = server.counts()
    assert all(counts.get(kind) for kind in ("500", "503", "truncate", "reset")), counts
    assert (run.path / "backbone.safetensors").read_bytes() == expected
    assert not (run.path / "quarantine.jsonl").exists()
