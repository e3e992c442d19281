"""The doctor finds what was put there, names it, and leaves a report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from adclr.config.parsing import build, load_recipe, parse_words
from adclr.config.settings import Settings
from adclr.data import doctor
from adclr.system import machine
from adclr.system.text import printable
from test_decode import deep_png
from tiny import Adclr

RNG = np.random.default_rng(0)


def photo(height: int, width: int) -> Image.Image:
    return Image.fromarray(RNG.integers(0, 256, (height, width, 3), np.uint8))


@pytest.fixture
def ward(tmp_path: Path) -> Path:
    """Twenty good images and one of every trouble."""
    folder = tmp_path / "the doctor's ward"
    (folder / "sub").mkdir(parents=True)
    for number in range(20):
        photo(100 + number, 120).save(folder / "sub" / f"{number:02d}.jpg")
    photo(100, 100).convert("L").save(folder / "gray.png")
    photo(20, 25).save(folder / "tiny.bmp")
    photo(40, 200).save(folder / "stretched.png")
    Image.new("RGB", (64, 64), "teal").save(folder / "constant.webp")
    Image.fromarray(RNG.integers(0, 4096, (70, 80)).astype(np.uint16)).save(folder / "deep.png")
    shutil.copy(folder / "sub" / "03.jpg", folder / "twin.jpg")
    (folder / "html.jpg").write_text("<html>")
    (folder / "empty.png").write_bytes(b"")
    (folder / "cut.jpg").write_bytes((folder / "sub" / "05.jpg").read_bytes()[:-200])
    bomb = bytearray((folder / "gray.png").read_bytes())
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
    assert f"--recipe {'adclr_plus_small' if torch.cuda.is_available() else 'adclr_cpu'}" in advice
    assert "13% cannot be read" in advice
    assert "1 images have more than 8 bits" in advice
    assert "1 files are copies" in advice
    text = (tmp_path / "report" / "doctor.txt").read_text()
    assert text.removesuffix("\n\nwritten by adclr doctor\n") in done.stdout
    for word in ("30 images", "duplicates: 1", "twin.jpg", "median", "█", "advice:"):
        assert word in text
    with Image.open(tmp_path / "report" / "contact_sheet.png") as sheet:
        assert sheet.size == (8 * doctor.CELL, 4 * doctor.CELL)


def test_colors_of_sixteen_bits_are_found(tmp_path: Path) -> None:
    import tifffile

    folder, deep = tmp_path / "data", RNG.integers(0, 65536, (3, 40, 50)).astype(np.uint16)
    folder.mkdir()
    (folder / "deep.png").write_bytes(deep_png(deep))
    tifffile.imwrite(folder / "deep.tif", deep.transpose(1, 2, 0), photometric="rgb")
    photo(40, 50).save(folder / "plain.png")
    photo(40, 50).save(folder / "plain.tif")
    report = doctor.examine_collection(str(folder), tmp_path / "report", doctor.DoctorSettings(num_workers=1))
    assert report["modes"] == {"RGB;16": 2, "RGB": 2}
    assert any(line.startswith("2 images have more than 8 bits") for line in report["advice"])
    assert not any("gray" in line for line in report["advice"])


@pytest.mark.parametrize(("channels", "mode"), [(3, "RGB;16"), (5, "5 bands")])
def test_a_given_white_is_that_of_mean_and_deviation_and_of_training(tmp_path: Path, channels: int, mode: str) -> None:
    """Two images of one scene, of which only one is bright: guessed from each, their ranges would differ."""
    import tifffile

    (tmp_path / "data").mkdir()
    images = [RNG.integers(0, top, (40, 50, channels)).astype(np.uint16) for top in (800, 10000)]
    for number, image in enumerate(images):
        tifffile.imwrite(
            tmp_path / "data" / f"{number}.tif", image, photometric="rgb" if channels == 3 else "minisblack"
        )
    settings = doctor.DoctorSettings(num_workers=1, num_channels=channels)
    guessed = doctor.examine_collection(str(tmp_path / "data"), tmp_path / "guessed", settings)
    assert guessed["modes"] == {mode: 2}
    assert any("max_value=WHITE" in line for line in guessed["advice"])
    given = settings.model_copy(update={"max_value": 10000.0})
    report = doctor.examine_collection(str(tmp_path / "data"), tmp_path / "given", given)
    expected = np.mean([image.mean(axis=(0, 1)) / 10000 for image in images], axis=0)
    assert np.abs(np.array(report["mean"]) - expected).max() < 0.003  # one level of 256, and rounding
    assert np.abs(np.array(guessed["mean"]) - expected).min() > 0.05
    assert any("data.max_value=10000" in line for line in report["advice"])
    assert not any("WHITE" in line for line in report["advice"])


def as_a_shell_splits(line: str) -> list[str]:
    done = subprocess.run(["sh", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_the_advice_can_be_pasted_into_a_shell(ward: Path, tmp_path: Path, adclr: Adclr) -> None:
    report = doctor.examine_collection(str(ward), tmp_path / "report", doctor.DoctorSettings(num_workers=1))
    program, *arguments = as_a_shell_splits(report["advice"][0])
    assert (program, arguments[:4]) == ("adclr", ["pretrain", str(ward), "--out", "runs/the_doctor_s_ward"])
    arguments[3] = str(tmp_path / "run")
    small = ["epochs=1", "warmup_epochs=0", "depth=1", "head_hidden_dim=16", "num_prototypes=16", "max_unreadable=0.2"]
    words = [word for word in arguments if not word.startswith(("train.epochs", "optim.warmup"))]
    done = adclr(*words, *small)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="sh may not know $'...'")
@pytest.mark.parametrize(
    "name",
    ["it's", 'a "b"', "$(touch x) `y` ; &", "two\nlines\t", "\x1b]0;owned\x07", "-rf *", "Äpfel 犬", "\udcff\x1b'\\9"],
)
def test_advice_is_harmless_on_a_terminal_and_in_a_shell(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    for number in range(4):
        photo(60, 50).convert("L").save(folder / f"{number}.png")
    report = doctor.examine_collection(str(folder), tmp_path / "report", doctor.DoctorSettings(num_workers=1))
    for line in (report["advice"][0], capsys.readouterr().out.split("advice:\n")[1].splitlines()[0]):
        assert printable(line) == line
        done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True, cwd=tmp_path)
        assert done.stdout.split(b"\0")[2] == os.fsencode(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "report"])


def test_lists_in_advice_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, images of more than 128 pixels have a setting that is a list, with a space in it."""
    monkeypatch.setattr(machine, "gpu_bytes", lambda device: 80 * 2**30)
    (tmp_path / "data").mkdir()
    for number in range(8):
        photo(140, 150).save(tmp_path / "data" / f"{number}.png")
    report = doctor.examine_collection(
        str(tmp_path / "data"), tmp_path / "report", doctor.DoctorSettings(num_workers=1)
    )
    assert "views.blur_sigma=[0.1, 2.0]" in as_a_shell_splits(report["advice"][0])


def test_sizes_are_in_units_that_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    for number in range(3):
        photo(40, 40).save(tmp_path / "data" / f"{number}.bmp")  # 4854 bytes
    report = doctor.examine_collection(
        str(tmp_path / "data"), tmp_path / "report", doctor.DoctorSettings(num_workers=1)
    )
    assert report["bytes"] == 3 * 4854
    assert "3 images, 15 kB; 3 can be read" in capsys.readouterr().out


def test_mean_and_deviation_of_channels_are_those_of_the_pixels(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pixels = [(RNG.random((50, 60, 3)) * (200, 100, 50) + shift).astype(np.uint8) for shift in (0, 40)]
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "data" / f"{number}.png")
    report = doctor.examine_collection(
        str(tmp_path / "data"), tmp_path / "report", doctor.DoctorSettings(num_workers=1)
    )
    both = np.concatenate(pixels) / 255
    assert report["mean"] == pytest.approx(both.mean(axis=(0, 1)).tolist(), abs=6e-4)
    assert report["std"] == pytest.approx(both.std(axis=(0, 1)).tolist(), abs=6e-4)
    mean, std = (" ".join(f"{x:.3f}" for x in report[name]) for name in ("mean", "std"))
    assert f"mean {mean}, standard deviation {std}" in (tmp_path / "report" / "doctor.txt").read_text()
    (line,) = (line for line in report["advice"] if "differ from the defaults of the recipes" in line)
    settings = build(Settings, parse_words(as_a_shell_splits(line.split("; set ")[1])))
    assert (list(settings.data.mean), list(settings.data.std)) == (report["mean"], report["std"])


def test_gray_images_are_advised_with_their_own_mean(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(4):
        Image.fromarray(RNG.integers(0, 51, (40, 40), np.uint8)).save(tmp_path / "data" / f"{number}.png")
    report = doctor.examine_collection(
        str(tmp_path / "data"), tmp_path / "report", doctor.DoctorSettings(num_workers=1)
    )
    (line,) = (line for line in report["advice"] if line.startswith("all images are gray; "))
    words = as_a_shell_splits(line.removeprefix("all images are gray; ").removesuffix(" trains on one channel"))
    settings = build(Settings, parse_words(words))
    assert settings.model.num_channels == 1
    assert settings.data.mean[0] == pytest.approx(0.098, abs=0.002)


@pytest.mark.parametrize("pages", [False, True])
def test_bands_are_named_with_the_setting_that_reads_them(tmp_path: Path, pages: bool) -> None:
    import tifffile

    folder = tmp_path / "bands of light"
    folder.mkdir()
    for number in range(8):
        bands = RNG.integers(0, 256, (5, 48, 40), np.uint8)
        planar = {} if pages else {"planarconfig": "separate"}
        tifffile.imwrite(folder / f"{number}.tif", bands, photometric="minisblack", **planar)
    report = doctor.examine_collection(str(folder), tmp_path / "report", doctor.DoctorSettings(num_workers=1))
    kind = "pages" if pages else "bands"
    (line,) = (line for line in report["advice"] if line.startswith(f"8 TIFF files have 5 {kind}"))
    assert "model.num_channels=5" in line
    if not pages:
        assert all("a TIFF file of 5 bands" in reason for reason in report["troubles"]["unreadable"])
    assert as_a_shell_splits(f"adclr doctor{line.split('adclr doctor')[1].split(' examines')[0]}")[2:] == [
        str(folder),
        "num_channels=5",
    ]
    report = doctor.examine_collection(
        str(folder), tmp_path / "report", doctor.DoctorSettings(num_workers=1, num_channels=5)
    )
    assert (report["readable"], report["modes"], len(report["mean"])) == (8, {"5 bands": 8}, 5)
    words = [word for word in as_a_shell_splits(report["advice"][0]) if "=" in word]
    assert build(Settings, load_recipe("adclr_small"), parse_words(words)).model.num_channels == 5


def test_a_file_of_colors_that_pillow_does_not_know_has_a_format(tmp_path: Path) -> None:
    import tifffile

    (tmp_path / "data").mkdir()
    tifffile.imwrite(tmp_path / "data" / "a.tif", RNG.random((40, 40, 3), np.float32), photometric="rgb")
    report = doctor.examine_collection(str(tmp_path / "data"), tmp_path / "out", doctor.DoctorSettings(num_workers=1))
    assert (report["readable"], report["formats"], report["modes"]) == (1, {"TIFF": 1}, {"3 bands": 1})


def test_dangling_links_are_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    photo(40, 40).save(data / "1.png")
    (data / "sub" / "2.png").symlink_to(tmp_path / "gone.png")
    (data / "3").symlink_to(tmp_path / "gone_folder")
    report = doctor.examine_collection(str(data), tmp_path / "report", doctor.DoctorSettings(num_workers=1))
    assert sorted(report["troubles"]["dangling links"]) == [
        f"{data}/3: a link to {tmp_path}/gone_folder, which is not there",
        f"{data}/sub/2.png: a link to {tmp_path}/gone.png, which is not there",
    ]
    assert any(line.startswith("2 links lead nowhere") for line in report["advice"])
    assert "dangling links: 2" in (tmp_path / "report" / "doctor.txt").read_text()


def test_a_damaged_shard_is_named_with_what_can_be_read_of_it(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(2):
        with tarfile.open(shards / f"{number}.tar", "w") as archive:
            for image in range(4):
                photo(40, 40).save(tmp_path / "x.png")
                archive.add(tmp_path / "x.png", f"{image}.png")
    with tarfile.open(shards / "1.tar") as archive:
        end = [member.offset for member in archive][3]
    os.truncate(shards / "1.tar", end)
    report = doctor.examine_collection(str(shards), tmp_path / "report", doctor.DoctorSettings(num_workers=1))
    assert report["images"] == 4 + 3
    (line,) = report["troubles"]["damaged shards"]
    assert line.startswith(f"{shards}/1.tar: it ends at byte {end} without end-of-archive blocks after 3 readable")
    assert report["damaged_shards"] == {f"{shards}/1.tar": ["1.tar/0.png", "1.tar/1.png", "1.tar/2.png"]}
    assert "data.allow_damaged_shards=true" in as_a_shell_splits(report["advice"][0])


def test_a_healthy_collection_and_one_with_nothing_in_it(images: Path, tmp_path: Path, adclr: Adclr) -> None:
    report = doctor.examine_collection(str(images / "train"), tmp_path / "fine", doctor.DoctorSettings())
    assert {name: len(found) for name, found in report["troubles"].items() if found} == {"tiny": 32}
    (tmp_path / "bad").mkdir()
    for number in range(3):
        (tmp_path / "bad" / f"{number}.png").write_text("no")
    report = doctor.examine_collection(str(tmp_path / "bad"), tmp_path / "out", doctor.DoctorSettings(num_workers=1))
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
