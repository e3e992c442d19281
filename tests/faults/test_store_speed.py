"""How fast images come from a store that answers after 200 ms; the figures are in docs/scale.md."""

from __future__ import annotations

import tarfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import adclr as package
from adclr.data.collection import open_source
from adclr.data.sources.store_reader import read_ahead
from store_server import Server
from tiny import TINY

LATENCY = 0.2  # s
SETTINGS = TINY | {
    **{"recipe": "adclr_small", "cache": "off", "batch_size": 20, "epochs": 1, "num_workers": 2, "log_every_steps": 50},
    **{"global_size": 32, "local_size": 16, "model.dim": 64, "model.depth": 4, "warmup_epochs": 0},
}


def write_images(folder: Path, count: int) -> Path:
    """Write shards of 100 small images."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for shard in range(count // 100):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as archive:
            for number in range(100):
                coarse = Image.fromarray(rng.integers(0, 255, (12, 12, 3), np.uint8))
                coarse.resize((96, 96), Image.Resampling.BICUBIC).save(folder / "one.jpg")
                archive.add(folder / "one.jpg", f"{shard:03d}/{number:03d}.jpg")
    (folder / "one.jpg").unlink()
    return folder


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
def test_latency_of_a_store_is_hidden(store: Server, tmp_path: Path) -> None:
    """A run of one epoch, from opening its images to its end; the seconds without its steps differ little."""
    data = write_images(tmp_path / "shards", 1000)
    url = store.put_folder(data, "speed")
    seconds: dict[str, float] = {}
    speeds: dict[str, float] = {}
    files = set()
    package.pretrain(data, out=tmp_path / "first", **SETTINGS)  # what is set up once in a process
    for name in ("local", "cold", "warm"):
        with ExitStack() as stack:
            if name != "local":
                stack.enter_context(store.faults(latency=LATENCY))
            started = time.monotonic()
            run = package.pretrain(data if name == "local" else url, out=tmp_path / name, **SETTINGS)
            seconds[name] = time.monotonic() - started
            speeds[name] = 1000 / seconds[name]
            requests = store.counts().get("requests", 0) if name != "local" else 0
        files.add((run.path / "backbone.safetensors").read_bytes())
        print(f"{name}: {speeds[name]:.0f} images/s, {seconds[name]:.2f} s, {requests} requests")
    assert len(files) == 1
    assert speeds["warm"] > 0.8 * speeds["local"]
    assert speeds["cold"] > 0.5 * speeds["local"]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["objects", "shards"])
def test_images_are_asked_for_ahead(
    store: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Nothing kept: each image is a request of 200 ms, and 64 are on their way at a time, at most 320 images/s."""
    monkeypatch.setenv("ADCLR_LOCAL_CACHE_GIB", "0")
    shards = write_images(tmp_path / "shards", 1000)
    if layout == "objects":
        for shard in sorted(shards.glob("*.tar")):
            with tarfile.open(shard) as archive:
                archive.extractall(tmp_path / "objects", filter="data")
    source = open_source(store.put_folder(tmp_path / layout, f"ahead-{layout}"))
    order = np.random.default_rng(0).permutation(1000).reshape(50, 20)
    with store.faults(latency=LATENCY):
        started = time.monotonic()
        count = sum(len(source.read(int(index))) > 0 for part in read_ahead(order, list, source) for index in part)
        rate = 1000 / (time.monotonic() - started)
    print(f"{layout}: {rate:.0f} images/s, {count} images")
    assert count == 1000
    assert rate > 100  # one after the other they come at 5 a second
