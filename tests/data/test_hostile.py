"""Collections as they are found: broken files of every kind, a folder that goes away, and hours of batches."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import adclr as package
from adclr.config.parsing import UserError
from adclr.data.augment import render
from adclr.data.decode import Decoder
from adclr.data.feed import Feed
from adclr.data.sources import ImageFolder
from adclr.data.view_plan import plan_batch
from adclr.system.runs import Run
from tiny import TINY, Adclr, tiny, words

RNG = np.random.default_rng(0)


def photo(height: int = 30, width: int = 40) -> Image.Image:
    return Image.fromarray(RNG.integers(0, 256, (height, width, 3), np.uint8))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def broken() -> dict[str, bytes]:
    jpeg, png = encoded(photo(), "JPEG"), encoded(photo(), "PNG")
    lying = bytearray(jpeg)
    frame = lying.index(b"\xff\xc0")
    lying[frame + 5 : frame + 9] = (60000).to_bytes(2, "big") * 2  # 60000x60000 pixels, it says
    bomb = bytearray(png)
    bomb[16:24] = (30000).to_bytes(4, "big") * 2
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    claiming = bytearray(jpeg)
    claiming[frame + 5 : frame + 9] = (45).to_bytes(2, "big") + (60).to_bytes(2, "big")  # more than the 30x40 there are
    crc = bytearray(png)
    crc[30] ^= 0xFF
    pixels = bytearray(png)
    pixels[-16] ^= 0xFF  # the last byte of their checksum is the thirteenth from the end
    return {
        "zero.jpg": b"",
        "truncated.jpg": jpeg[: len(jpeg) // 2],
        "truncated.png": png[: len(png) // 2],
        "html.jpg": b"<html><body>not found</body></html>",
        "crc.png": bytes(crc),
        "pixels.png": bytes(pixels),
        "lying.jpg": bytes(lying),
        "claiming.jpg": bytes(claiming),
        "bomb.png": bytes(bomb),
    }


def strange() -> dict[str, bytes]:
    """Odd, but images."""
    files = {
        "one.png": encoded(photo(1, 1), "PNG"),
        "line.png": encoded(photo(1, 5000), "PNG"),
        "column.jpg": encoded(photo(5000, 1), "JPEG"),
        "cmyk.jpg": encoded(photo().convert("CMYK"), "JPEG"),
        "palette.png": encoded(photo().convert("P"), "PNG"),
        "clear.webp": encoded(photo().convert("RGBA"), "WEBP"),
        "grey16.png": encoded(Image.fromarray(RNG.integers(0, 65536, (20, 20)).astype(np.uint16)), "PNG"),
        "moving.gif": encoded(photo(), "GIF", save_all=True, append_images=[photo(), photo()]),
        "wrong_name.png": encoded(photo(), "JPEG"),
    }
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        files[f"turned{orientation}.jpg"] = encoded(photo(), "JPEG", exif=exif)
    return files


@pytest.fixture
def wild(tmp_path: Path) -> Path:
    """180 images, of which 9 (5 %) are broken, each in its own way."""
    folder = tmp_path / "wild"
    folder.mkdir()
    files = broken() | strange()
    for number in range(180 - len(files)):
        files[f"plain{number:03d}.jpg"] = encoded(photo(), "JPEG")
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("cache", ["off", "auto"])
def test_training_goes_on_over_broken_files(wild: Path, tmp_path: Path, adclr: Adclr, cache: str) -> None:
    command = ["pretrain", wild, "--out", tmp_path / "run", *words(TINY), f"cache={cache}"]
    done = adclr(*command)
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    rows = list(run.rows("quarantine.jsonl"))
    assert sorted(row["path"] for row in rows) == sorted(broken())
    reasons = {row["path"]: row["reason"] for row in rows}
    assert reasons["truncated.jpg"] == "broken JPEG: Image is incomplete or truncated"
    assert reasons["claiming.jpg"] == "broken JPEG: it ends before all the pixels that its header says"
    assert reasons["pixels.png"] == "broken PNG: the checksum of its part IDAT is wrong"
    for reason in reasons.values():  # words for a person, and no place in the source of a library
        assert re.fullmatch(r"[\w ,:().=']{12,120}", reason), reason
    assert f"{len(rows)} images could not be read" in done.stdout
    assert all(np.isfinite(row["loss"]) for row in run.rows("metrics.jsonl"))
    stopped = adclr(
        "pretrain", wild, "--out", tmp_path / "strict", *words(TINY), f"cache={cache}", "max_unreadable=.02"
    )
    assert stopped.returncode == 2
    assert "of 180 images cannot be read" in stopped.stderr
    assert stopped.stderr.strip().splitlines()[-1].startswith("adclr: ")


def test_a_missing_package_ends_the_run_once_and_lists_no_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tifffile

    data, changes = tmp_path / "data", {"num_channels": 5, "mean": [0.5] * 5, "std": [0.25] * 5}
    data.mkdir()
    for number in range(16):
        tifffile.imwrite(data / f"{number}.tif", RNG.integers(0, 256, (24, 24, 5), np.uint8), photometric="minisblack")
    tiny = TINY | changes | {"recipe": "adclr_small", "epochs": 1, "warmup_epochs": 0}
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "tifffile", None)
        for cache in ("auto", "off"):
            with pytest.raises(UserError, match=r"needs tifffile, which is not installed; run: pip install"):
                package.pretrain(data, out=tmp_path / "run", cache=cache, **tiny)
            assert not (tmp_path / "run" / "quarantine.jsonl").exists()
    assert package.pretrain(data, out=tmp_path / "run", **tiny).finished  # with it, the same command trains


def test_an_image_of_numbers_that_are_not_finite_is_listed_with_its_reason(images: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(images / "train", data)
    Image.fromarray(np.full((20, 20), np.nan, np.float32)).save(data / "hole.tif")
    run = package.pretrain(data, out=tmp_path / "run", recipe="adclr_small", **TINY)
    assert list(run.rows("quarantine.jsonl")) == [
        {"path": "hole.tif", "reason": "400 of its 400 numbers are NaN or infinite; replace them, for example by 0"}
    ]


@pytest.mark.parametrize("num_workers", [0, 1, 4, 13])
def test_what_is_shown_does_not_hang_on_broken_files_elsewhere(wild: Path, num_workers: int) -> None:
    """Removed from the collection or added to it, they change nothing of what is shown of any other image."""
    settings = tiny()

    def views(folder: Path) -> dict[str, list[torch.Tensor]]:
        source = ImageFolder(folder)
        feed = Feed(source, num_workers, Decoder())
        results = {}
        order = ((3, np.array([i])) for i in range(len(source)))
        for path, batch in zip(
            source.paths, feed.batches(order, lambda e, k, s: plan_batch(settings, e, k, s)), strict=True
        ):
            made = render(batch.packed, batch.plan, settings.data.mean, settings.data.std)
            assert made.local_crops is not None
            assert made.queries is not None
            results[path] = [made.global_crops, made.local_crops, made.queries]
        return results

    before = views(wild)
    for name in broken():
        (wild / name).unlink()
    after = views(wild)
    assert len(after) == 171
    assert all(all(map(torch.equal, before[path], shown)) for path, shown in after.items())
    (wild / "another.jpg").write_bytes(b"")
    more = views(wild)
    assert len(more) == 172
    assert all(all(map(torch.equal, more[path], shown)) for path, shown in after.items())


def test_a_folder_that_disappears_stops_the_run_with_its_checkpoint_whole(images: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "run"
    shutil.copytree(images / "train", data)
    changes = TINY | {"epochs": 5000, "checkpoint_every_steps": 2, "cache": "off"}
    process = subprocess.Popen(
        [sys.executable, "-m", "adclr", "pretrain", str(data), "--out", str(out), *words(changes)],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (out / "checkpoints" / "latest").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.rename(data, tmp_path / "elsewhere")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "has disappeared; restore it" in errors
    assert "Traceback" not in errors
    assert package.load(out).dim == 16
    assert Run(out).steps()


def test_thousands_of_batches_leave_nothing_behind(images: Path) -> None:
    source = ImageFolder(images / "train")
    feed = Feed(source, 4, Decoder())
    rng = np.random.default_rng(0)
    order = ((0, rng.integers(0, len(source), 4)) for _ in range(3000))

    def used() -> tuple[int, int, int]:
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return resident, threading.active_count(), len(os.listdir("/proc/self/fd"))

    early = late = used()
    settings = tiny()
    for number, _ in enumerate(feed.batches(order, lambda e, k, s: plan_batch(settings, e, k, s))):
        if number == 500:
            early = used()
        late = used() if number == 2990 else late
    assert late[0] - early[0] < 2**24  # 16 MiB
    assert late[1] == early[1]
    assert late[2] <= early[2] + feed.num_workers  # files that are being read just then
    assert threading.active_count() < early[1]
