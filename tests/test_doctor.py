"""The doctor finds what was put there, names it, and leaves a report."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from adclr import doctor
from test_decode import deep_png
from tiny import Adclr

RNG = np.random.default_rng(0)


def photo(height: int, width: int) -> Image.Image:
    return Image.fromarray(RNG.integers(0, 256, (height, width, 3), np.uint8))


@pytest.fixture
def ward(tmp_path: Path) -> Path:
    """Twenty good images and one of every trouble."""
    folder = tmp_path / "ward"
    (folder / "sub").mkdir(parents=True)
    for number in range(20):
        photo(100 + number, 120).save(folder / "sub" / f"{number:02d}.jpg")
    photo(100, 100).convert("L").save(folder / "grey.png")
    photo(20, 25).save(folder / "tiny.bmp")
    photo(40, 200).save(folder / "stretched.png")
    Image.new("RGB", (64, 64), "teal").save(folder / "constant.webp")
    Image.fromarray(RNG.integers(0, 4096, (70, 80)).astype(np.uint16)).save(folder / "deep.png")
    shutil.copy(folder / "sub" / "03.jpg", folder / "twin.jpg")
    (folder / "html.jpg").write_text("<html>")
    (folder / "empty.png").write_bytes(b"")
    (folder / "cut.jpg").write_bytes((folder / "sub" / "05.jpg").read_bytes()[:-200])
    bomb = bytearray((folder / "grey.png").read_bytes())
    bomb[16:24] = (30000).to_bytes(4, "big") * 2
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    (folder / "bomb.png").write_bytes(bomb)
    return folder


def test_every_trouble_is_found(ward: Path, tmp_path: Path, adclr: Adclr) -> None:
    done = adclr("doctor", ward, "--out", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report" / "doctor.json").read_text())
    assert (report["images"], report["readable"]) == (30, 26)
    assert report["formats"] == {"JPEG": 21, "PNG": 3, "BMP": 1, "WEBP": 1}
    troubles = report["troubles"]
    assert sorted(line.split(":")[0] for line in troubles["unreadable"]) == [
        "bomb.png",
        "cut.jpg",
        "empty.png",
        "html.jpg",
    ]
    assert any("30000x30000 pixels are more than data.max_pixels" in line for line in troubles["unreadable"])
    assert troubles["duplicates"] == ["twin.jpg"]
    assert troubles["tiny"] == ["tiny.bmp"]
    assert troubles["stretched"] == ["stretched.png"]
    assert troubles["constant"] == ["constant.webp"]
    assert sum(report["histogram"].values()) == 26
    advice = "\n".join(report["advice"])
    assert f"--recipe {'adclr_small' if torch.cuda.is_available() else 'adclr_cpu'}" in advice
    assert "13% cannot be read" in advice
    assert "1 images have more than 8 bits" in advice
    assert "1 files are copies" in advice
    text = (tmp_path / "report" / "doctor.txt").read_text()
    assert text.strip() in done.stdout
    for word in ("30 images", "duplicates: 1", "twin.jpg", "median", "█", "advice:"):
        assert word in text
    with Image.open(tmp_path / "report" / "contact_sheet.png") as sheet:
        assert sheet.size == (8 * doctor.CELL, 4 * doctor.CELL)


def test_colours_of_sixteen_bits_are_found(tmp_path: Path) -> None:
    import tifffile

    folder, deep = tmp_path / "data", RNG.integers(0, 65536, (3, 40, 50)).astype(np.uint16)
    folder.mkdir()
    (folder / "deep.png").write_bytes(deep_png(deep))
    tifffile.imwrite(folder / "deep.tif", deep.transpose(1, 2, 0), photometric="rgb")
    photo(40, 50).save(folder / "plain.png")
    photo(40, 50).save(folder / "plain.tif")
    report = doctor.run(str(folder), tmp_path / "report", doctor.Settings(num_workers=1))
    assert report["modes"] == {"RGB;16": 2, "RGB": 2}
    assert any(line.startswith("2 images have more than 8 bits") for line in report["advice"])
    assert not any("grey" in line for line in report["advice"])


def test_the_advice_can_be_followed(ward: Path, tmp_path: Path, adclr: Adclr) -> None:
    adclr("doctor", ward, "--out", tmp_path / "report")
    report = json.loads((tmp_path / "report" / "doctor.json").read_text())
    first = report["advice"][0].split()
    small = ["epochs=1", "warmup_epochs=0", "depth=1", "head_hidden_dim=16", "num_prototypes=16", "max_unreadable=0.2"]
    words = [word for word in first if not word.startswith(("train.epochs", "optim.warmup"))]
    done = adclr("pretrain", ward, "--out", tmp_path / "run", *words, *small)
    assert done.returncode == 0, done.stderr


def test_a_healthy_collection_and_one_with_nothing_in_it(images: Path, tmp_path: Path, adclr: Adclr) -> None:
    report = doctor.run(str(images / "train"), tmp_path / "fine", doctor.Settings())
    assert {name: len(found) for name, found in report["troubles"].items() if found} == {"tiny": 32}
    (tmp_path / "bad").mkdir()
    for number in range(3):
        (tmp_path / "bad" / f"{number}.png").write_text("no")
    report = doctor.run(str(tmp_path / "bad"), tmp_path / "out", doctor.Settings(num_workers=1))
    assert report["readable"] == 0
    assert report["advice"] == ["nothing here can be read; look at the reasons above"]
    assert not (tmp_path / "out" / "contact_sheet.png").exists()
    for arguments, message in (
        (["doctor"], "no images were named"),
        (["doctor", tmp_path / "nowhere"], "does not exist"),
        (["doctor", images, "--out", tmp_path / "bad" / "0.png"], "is a file"),
        (["doctor", images, "pixels=3"], "did you mean 'max_pixels'?"),
    ):
        done = adclr(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert message in done.stderr
    assert "max_pixels" in adclr("doctor", "--help").stdout
