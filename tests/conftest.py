"""Fixtures: a folder of scenes, and the program."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

if "OMP_WAIT_POLICY" not in os.environ:  # before torch is imported, as `adclr` does: the tests share the cores
    os.environ["OMP_WAIT_POLICY"] = "passive"

import torch

if not torch.cuda.is_available():  # before any kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"

from adclr.data.sets import scenes
from adclr.system import store_urls, stores
from adclr.system.stores import cache as store_cache
from store_server import Server, running
from tiny import THREADS, Adclr, adclr_command

torch.set_num_threads(THREADS)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 + 16 scenes of 24 pixels, in train/ and val/ with a sub-folder for each class."""
    folder = tmp_path_factory.mktemp("scenes")
    scenes.write_scenes(folder, seed=3, num_train=32, num_val=16, size=24, show=False)
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Networks as small as in tests are no faster with two, and on a busy machine much slower."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture
def adclr() -> Adclr:
    return adclr_command


@pytest.fixture(scope="session")
def store_server() -> Iterator[Server]:
    """An S3 server with an empty bucket."""
    with running() as server:
        yield server


@pytest.fixture
def store(store_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, which this process finds by its environment, with a new local cache and short waits."""
    for name, value in store_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ADCLR_LOCAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store_cache, "_settings", (None, None))
    monkeypatch.setattr(store_urls, "_whole", {})
    monkeypatch.setattr(stores, "_down", {})
    monkeypatch.setattr(stores, "FIRST_WAIT", 0.02)
    return store_server
