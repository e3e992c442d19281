"""ImageReader as a network at rest sees them: Pillow's pixels whoever makes them, in order, whatever the threads."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from adclr.config.parsing import UserError
from adclr.data import nvjpeg
from adclr.data.augment import frame_kernels
from adclr.data.cache import Store
from adclr.data.decode import Decoder
from adclr.data.nvjpeg import GpuDecoder
from adclr.data.packed import pack
from adclr.data.sources import ImageFolder
from adclr.features import reader
from adclr.features.reader import Frame, ImageReader, center_crop, whole_image
from kernel_device import DEVICE, needs_interpreter

CPU = torch.device("cpu")
SIZES = [(40, 50), (33, 90), (120, 41), (9, 7), (1, 60), (64, 64)]


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth shapes, sharp edges and noise; black and white beside each other, where a cubic overshoots."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    image = np.stack([128 + 120 * np.sin((x * (c + 1) + y) / 9) for c in range(3)]) + rng.normal(
        0, 8, (3, height, width)
    )
    image[:, (x // 5 + y // 4) % 3 == 0] = 0
    image[:, (x // 7 + y // 3) % 4 == 0] = 255
    return image.clip(0, 255).astype(np.uint8)


def by_pillow(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The protocol as it reads: the whole image resized by Pillow, then the center."""
    height, width = size
    scale = max(height * 256 / 224 / image.shape[1], width * 256 / 224 / image.shape[2])
    all_of_it = max(width, round(image.shape[2] * scale)), max(height, round(image.shape[1] * scale))
    left, top = (all_of_it[0] - width) // 2, (all_of_it[1] - height) // 2
    made = Image.fromarray(image.transpose(1, 2, 0)).resize(all_of_it, Image.Resampling.BICUBIC)
    return np.asarray(made.crop((left, top, left + width, top + height))).transpose(2, 0, 1)


def by_formula(image: np.ndarray, frame: Frame) -> np.ndarray:
    """Across, rounded, then down, rounded, by matrices in float64; all of it, of which the frame is cut."""

    def matrix(length: int, size: int) -> np.ndarray:
        weights, scale = np.zeros((size, length)), length / size
        for target in range(size):
            x = np.abs((np.arange(length) + 0.5 - (target + 0.5) * scale) / max(scale, 1))
            near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
            row = np.where(x < 1, near, np.where(x < 2, far, 0))
            weights[target] = row / row.sum()
        return weights

    rows, columns, top, left, height, width = frame
    half = np.floor(image @ matrix(image.shape[2], columns).T + 0.5).clip(0, 255)
    full = np.floor(matrix(image.shape[1], rows) @ half + 0.5).clip(0, 255)
    return full[:, top : top + height, left : left + width]


@pytest.mark.parametrize("size", [(32, 32), (24, 40), (224, 224)])
def test_the_center_is_cut_out_of_the_resized_image(size: tuple[int, int]) -> None:
    for height, width in SIZES:
        image, frame = picture(height, width), center_crop(size)(height, width)
        actual = reader.resize(image, frame).astype(int)
        expected = [by_formula(image, frame)] if frame.columns < 1000 else []
        if height <= width:  # images that are higher Pillow may resize down first
            expected.append(by_pillow(image, size))
        for pixels in expected:
            assert np.abs(actual - pixels).max() <= 1
            assert (actual != pixels).mean() < 2e-3


def test_of_a_long_strip_only_the_center_is_made() -> None:
    """All of it would be 25 million pixels wide."""
    frame = center_crop((224, 224))(1, 100_000)
    assert frame.columns > 2e7
    assert reader.resize(np.full((3, 1, 100_000), 7, np.uint8), frame).shape == (3, 224, 224)


@pytest.mark.parametrize(
    ("side", "patch", "max_side", "image", "expected"),
    [
        (448, 16, 2048, (500, 333), (672, 448)),
        (448, 14, 2048, (100, 100), (448, 448)),
        (None, 16, 2048, (100, 60), (96, 64)),
        (None, 16, 2048, (3, 2), (16, 16)),
        (None, 16, 2048, (4096, 1024), (2048, 512)),
        (448, 16, 2048, (10, 100_000), (16, 2048)),
        (None, 14, 100, (1000, 990), (98, 98)),
    ],
)
def test_whole_images_have_whole_patches(
    side: int | None, patch: int, max_side: int, image: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert whole_image(side, patch, max_side)(*image) == Frame(*expected, 0, 0, *expected)


@needs_interpreter
@pytest.mark.parametrize(
    "framing", [center_crop((32, 32)), center_crop((24, 72)), whole_image(None, 8, 64), whole_image(40, 8, 100)]
)
def test_the_kernels_make_pillows_pixels(framing: reader.Framing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_kernels, "HALF", 20_000)  # in several launches
    if DEVICE.type == "cpu":  # the interpreter takes as long for a small block as for a large one
        monkeypatch.setattr(frame_kernels, "ROWS", 128)
    made = [picture(height, width, seed) for seed, (height, width) in enumerate(SIZES)]
    frames = [framing(*image.shape[1:]) for image in made]
    assert_pillows(made, frames)


@needs_interpreter
def test_blocks_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_kernels, "ROWS", 4)
    monkeypatch.setattr(frame_kernels, "COLUMNS", 16)
    assert_pillows([picture(30, 20)], [Frame(17, 41, 3, 5, 9, 20)])


def assert_pillows(made: list[np.ndarray], frames: list[Frame]) -> None:
    packed = pack(made).to(DEVICE)
    sizes = np.array([3 * frame.height * frame.width for frame in frames])
    out = torch.full((int(sizes.sum()) + 1,), 99, dtype=torch.uint8, device=DEVICE)
    places = np.cumsum(sizes) - sizes
    frame_kernels.resize(packed, np.array(frames), places, out)
    assert out[-1] == 99  # nothing is written beside
    for image, frame, place, size in zip(made, frames, places, sizes, strict=True):
        actual = out[place : place + size].cpu().view(3, frame.height, frame.width).numpy().astype(int)
        difference = np.abs(actual - reader.resize(image, frame))
        assert difference.max() <= 1
        assert (difference > 0).mean() < 5e-3


@pytest.fixture
def folder(images: Path, tmp_path: Path) -> Path:
    """Scenes, and a few images of other sizes between them."""
    shutil.copytree(images / "train", tmp_path / "data")
    for number, (height, width) in enumerate(SIZES):
        Image.fromarray(picture(height, width).transpose(1, 2, 0)).save(tmp_path / "data" / f"m{number}.png")
    return tmp_path / "data"


def collected(found: ImageReader, batch: int) -> dict[int, np.ndarray]:
    count = len(found.source)
    seen: dict[int, np.ndarray] = {}
    for made in found.batches(np.arange(i, min(i + batch, count)) for i in range(0, count, batch)):
        assert len({group.pixels.shape[1:] for group in made.groups}) == len(made.groups)
        for group in made.groups:
            for index, pixels in zip(group.indices.tolist(), group.pixels, strict=True):
                assert index not in seen
                seen[index] = pixels.numpy()
    return seen


@pytest.mark.parametrize(("workers", "batch"), [(1, 5), (4, 7), (3, 100)])
def test_every_image_comes_once_whatever_the_threads(folder: Path, workers: int, batch: int) -> None:
    source = ImageFolder(folder)
    framing = whole_image(None, 8, 64)
    actual = collected(ImageReader(source, Decoder(), framing, CPU, workers), batch)
    assert sorted(actual) == list(range(len(source)))
    for index, pixels in actual.items():
        image = Decoder()(source.read(index))
        assert np.array_equal(pixels, reader.resize(image, framing(*image.shape[1:])))


def test_unreadable_images_are_named_and_nothing_else_changes(folder: Path) -> None:
    source = ImageFolder(folder)
    before = collected(ImageReader(source, Decoder(), center_crop((16, 16)), CPU, 2), 8)
    for index in (0, 9, 10):
        (folder / source.paths[index]).write_bytes(b"broken")
    (folder / source.paths[11]).unlink()
    actual = ImageReader(source, Decoder(), center_crop((16, 16)), CPU, 2)
    reasons: dict[int, str] = {}
    for made in actual.batches([np.arange(0, 10), np.arange(10, len(source))]):
        reasons |= made.unreadable
        for group in made.groups:
            for index, pixels in zip(group.indices.tolist(), group.pixels, strict=True):
                assert np.array_equal(pixels.numpy(), before.pop(index))
    assert sorted(reasons) == sorted(before) == [0, 9, 10, 11]
    assert "known format" in reasons[9]
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="has disappeared"):
        list(actual.batches([np.arange(3)]))


def test_pixels_that_are_kept_are_the_files(folder: Path) -> None:
    source = ImageFolder(folder)
    store = Store(pack([Decoder()(source.read(i)) for i in range(len(source))]))
    framing = center_crop((16, 16))
    kept = collected(ImageReader(source, Decoder(), framing, CPU, 2, store), 8)
    for index, pixels in collected(ImageReader(source, Decoder(), framing, CPU, 2), 8).items():
        assert np.array_equal(pixels, kept[index])


@needs_interpreter
def test_what_the_gpu_decodes_and_what_the_cpu_does_come_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JPEGs of all orientations, other files, and JPEGs that turn out to be broken only when they are decoded."""
    monkeypatch.setattr(reader, "MAX_DECODE_BYTES", 3 * 40 * 56 * 3)  # three images at once
    if DEVICE.type == "cpu":
        monkeypatch.setattr(frame_kernels, "ROWS", 128)
    for number in range(12):
        exif = Image.Exif()
        exif[0x0112] = number % 8 + 1
        picture_ = Image.fromarray(picture(40, 56, number).transpose(1, 2, 0))
        picture_.save(tmp_path / f"{number:02d}.jpg", exif=exif, quality=95, subsampling=0)
    Image.fromarray(picture(30, 30).transpose(1, 2, 0)).save(tmp_path / "05a.png")
    (tmp_path / "05b.png").write_bytes(b"broken")
    half = (tmp_path / "07.jpg").read_bytes()[:-600] + b"\xff\xd9"
    (tmp_path / "07.jpg").write_bytes(half)
    real = nvjpeg._nvjpeg

    def strict(data: list[bytes], device: torch.device) -> list[torch.Tensor]:
        if half in data:  # what decoders make of it differs
            raise RuntimeError("broken")
        return real(data, device)

    monkeypatch.setattr(nvjpeg, "_nvjpeg", strict)
    source, framing = ImageFolder(tmp_path), whole_image(None, 8, 64)
    device = torch.device(DEVICE.type, 0) if DEVICE.type == "cuda" else DEVICE
    actual = ImageReader(source, Decoder(), framing, device, 2)
    actual.gpu = GpuDecoder(Decoder(), device)
    assert actual.gpu.take(source.read(8)) is not None
    assert actual.gpu.take(half) is not None
    (batch,) = actual.batches([np.arange(len(source))])
    assert {source.paths[index] for index in batch.unreadable} == {"05b.png", "07.jpg"}
    assert [tuple(group.pixels.shape[2:]) for group in batch.groups] == [(40, 56), (56, 40), (32, 32)]
    seen = []
    for group in batch.groups:
        for index, pixels in zip(group.indices.tolist(), group.pixels.cpu().numpy(), strict=True):
            image = Decoder()(source.read(index))
            assert np.abs(pixels.astype(int) - reader.resize(image, framing(*image.shape[1:]))).mean() <= 1
            seen.append(index)
    assert sorted(seen + list(batch.unreadable)) == list(range(14))
    store = Store(pack([Decoder()(source.read(index)) for index in seen]).to(device))
    store.on_gpu = True
    kept = ImageReader(source, Decoder(), framing, device, 2, store)
    (batch,) = kept.batches([np.array([3, 0, 5])])
    for group in batch.groups:
        for index, pixels in zip(group.indices.tolist(), group.pixels.cpu().numpy(), strict=True):
            image = Decoder()(source.read(seen[index]))
            assert np.abs(pixels.astype(int) - reader.resize(image, framing(*image.shape[1:]))).max() <= 1
