"""Which files go to the GPU's decoder, and that a batch of them is what the CPU makes of it.

On a machine without a GPU the same code asks torchvision's decoder of the CPU for a batch.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from adclr.data.decode import Decoder, Unreadable
from adclr.data.feed import Feed
from adclr.data.jpeg_header import read_header
from adclr.data.nvjpeg import Encoded, GpuDecoder
from adclr.data.sets import scenes
from adclr.data.sources import ImageFolder
from adclr.data.view_plan import plan_batch
from kernel_device import DEVICE
from tiny import tiny

ON_GPU = DEVICE.type == "cuda"
NEAR = 0.5 if ON_GPU else 0.0  # of 255, in the mean, where colors are stored at every pixel


def jpeg(number: int = 0, size: tuple[int, int] = (40, 56), orientation: int = 1, **options: Any) -> bytes:
    image = Image.fromarray(scenes.scene(0, number, 64).image[: size[0], : size[1]])
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif, **({"quality": 92, "subsampling": 0} | options))
    return buffer.getvalue()


def test_it_takes_what_it_is_faster_at_and_nothing_doubtful() -> None:
    decoder = GpuDecoder(Decoder(max_pixels=10_000, max_side=64, shrink_above=60), DEVICE)
    assert decoder.take(jpeg()) is not None
    assert decoder.take(jpeg() + b"\0" * 20) is not None  # some cameras fill up
    assert decoder.take(jpeg(progressive=True)) is None
    assert decoder.take(jpeg()[:-300]) is None  # not whole
    scan = jpeg().index(b"\xff\xda")
    assert decoder.take(jpeg()[:scan] + b"\xff\xd9") is None  # no pixels, of which nvJPEG makes some
    assert decoder.take(jpeg()[: scan + 14] + b"\xff\xd9") is None  # only their header
    single = bytearray(jpeg())
    single[scan + 4] = 1
    assert decoder.take(bytes(single)) is None  # colors in scans of their own
    assert decoder.take(b"<html>") is None
    assert decoder.take(jpeg(size=(64, 64))) is not None
    small = GpuDecoder(Decoder(max_side=50), DEVICE)
    assert small.take(jpeg()) is None  # it would be made smaller
    assert GpuDecoder(Decoder(max_pixels=1000), DEVICE).take(jpeg()) is None
    assert GpuDecoder(Decoder(num_channels=1), DEVICE).take(jpeg()) is None
    buffer = io.BytesIO()
    Image.new("L", (40, 40)).save(buffer, "JPEG")
    assert decoder.take(buffer.getvalue()) is None  # grey
    buffer = io.BytesIO()
    Image.new("CMYK", (40, 40)).save(buffer, "JPEG")
    assert decoder.take(buffer.getvalue()) is None


def test_red_green_and_blue_that_were_not_transformed_are_known_by_either_sign() -> None:
    data = jpeg()
    header = read_header(data)
    assert header is not None
    assert header.baseline
    adobe = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00"
    for transform, baseline in ((0, False), (1, True)):
        marked = read_header(data[:2] + adobe + bytes([transform]) + data[2:])
        assert marked is not None
        assert marked.baseline == baseline
    frame = data.index(b"\xff\xc0")
    named = bytearray(data)
    for component, letter in enumerate(b"RGB"):
        named[frame + 10 + 3 * component] = letter
    marked = read_header(bytes(named))
    assert marked is not None
    assert not marked.baseline


def test_a_batch_is_what_the_cpu_makes_of_it_upright_and_in_order() -> None:
    cpu = Decoder()
    decoder = GpuDecoder(cpu, DEVICE)
    blobs = [jpeg(number, orientation=1 + number) for number in range(8)]
    blobs += [jpeg(9, progressive=True), jpeg(10, size=(33, 47))]
    items = [decoder.take(blob) or cpu(blob) for blob in blobs]
    assert sum(isinstance(item, Encoded) for item in items) == 9
    packed, failed = decoder.pack(items)
    assert packed is not None
    assert failed == []
    assert packed.bytes.device.type == DEVICE.type
    for blob, offset, size in zip(blobs, packed.offsets, packed.sizes, strict=True):
        expected = cpu(blob)
        assert expected.shape[1:] == tuple(size)
        actual = packed.bytes[offset : offset + expected.size].cpu().numpy().reshape(expected.shape)
        assert np.abs(actual.astype(float) - expected).mean() <= NEAR


def cut_and_closed(data: bytes, share: float) -> bytes:
    """A JPEG that ends in its pixels, with an end marker as if it were whole."""
    scan = data.index(b"\xff\xda") + 14
    return data[: scan + int((len(data) - scan) * share)].rstrip(b"\xff") + b"\xff\xd9"


@pytest.mark.parametrize("subsampling", [0, 2])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_file_that_is_cut_off_and_closed_is_refused_as_the_cpu_refuses_it(orientation: int, subsampling: int) -> None:
    cpu = Decoder()
    decoder = GpuDecoder(cpu, DEVICE)
    whole = jpeg(orientation, (64, 64), orientation, subsampling=subsampling)
    for share in (0.05, 0.3, 0.6, 0.8):
        cut = cut_and_closed(whole, share)
        with pytest.raises(Unreadable, match="it ends before all the pixels"):
            cpu(cut)
        blobs = [jpeg(1), cut, jpeg(2, progressive=True), whole]
        items = [decoder.take(blobs[0]), decoder.take(cut), cpu(blobs[2]), decoder.take(whole)]
        assert [isinstance(item, Encoded) for item in items] == [True, True, False, True]
        assert decoder.pack(items) == (None, [1])  # type: ignore[arg-type]


def test_a_whole_image_of_that_gray_is_decoded_by_the_cpu_in_its_place() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 24), (128, 128, 128)).save(buffer, "JPEG")
    cpu = Decoder()
    decoder = GpuDecoder(cpu, DEVICE)
    blobs = [jpeg(1), buffer.getvalue(), jpeg(2, orientation=6), buffer.getvalue(), jpeg(3, progressive=True), jpeg(4)]
    packed, failed = decoder.pack([decoder.take(blob) or cpu(blob) for blob in blobs])
    assert packed is not None
    assert failed == []
    for blob, offset, size in zip(blobs, packed.offsets, packed.sizes, strict=True):
        expected = cpu(blob)
        assert expected.shape[1:] == tuple(size)
        pixels = packed.bytes[offset : offset + expected.size].cpu().numpy().reshape(expected.shape)
        assert np.abs(pixels.astype(float) - expected).mean() <= NEAR


def test_batches_with_broken_files_are_filled_by_the_rule(tmp_path: Path) -> None:
    """One without pixels, one that is no picture, one that is not there, and one that is cut off."""
    for number in range(12):
        (tmp_path / f"{number:02d}.jpg").write_bytes(jpeg(number))
    whole = jpeg(3)
    scan = whole.index(b"\xff\xda")
    (tmp_path / "03.jpg").write_bytes(whole[:scan] + b"\xff\xd9")  # whole to the eye, without pixels
    (tmp_path / "05.jpg").write_bytes(b"<html>")
    (tmp_path / "09.jpg").write_bytes(cut_and_closed(jpeg(9), 0.5))
    source, settings = ImageFolder(tmp_path), tiny()
    (tmp_path / "07.jpg").unlink()

    def batches(gpu: GpuDecoder | None, listed: list[str]) -> list[Any]:
        feed = Feed(source, 2, Decoder(), on_unreadable=lambda path, reason: listed.append(path), gpu_decoder=gpu)
        order = [(0, np.arange(0, 4)), (0, np.arange(4, 8)), (0, np.arange(8, 12))]
        return list(feed.batches(order, lambda e, k, s: plan_batch(settings, e, k, s)))

    told: list[str] = []
    also: list[str] = []
    for a, b in zip(batches(None, told), batches(GpuDecoder(Decoder(), DEVICE), also), strict=True):
        assert np.array_equal(a.packed.sizes, b.packed.sizes)
        assert np.array_equal(a.packed.offsets, b.packed.offsets)
        assert (a.packed.bytes.float() - b.packed.bytes.cpu().float()).abs().mean() <= NEAR
        assert np.array_equal(a.plan.global_crops.boxes, b.plan.global_crops.boxes)
    assert sorted(told) == sorted(also) == ["03.jpg", "05.jpg", "07.jpg", "09.jpg"]


def test_one_file_that_the_gpu_refuses_is_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It goes to the CPU alone, and is not held against it there."""
    from adclr.data import nvjpeg

    for number in range(6):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
    odd, real, asked = jpeg(4), nvjpeg._nvjpeg, []

    def picky(data: list[bytes], device: torch.device) -> list[torch.Tensor]:
        if odd in data:
            raise RuntimeError("nvJPEG: not this one")
        return real(data, device)

    decoder = Decoder()

    def counted(data: bytes) -> Any:
        asked.append(data)
        return decoder(data)

    monkeypatch.setattr(nvjpeg, "_nvjpeg", picky)
    listed: list[str] = []
    source, settings = ImageFolder(tmp_path), tiny()
    feed = Feed(
        source, 2, counted, on_unreadable=lambda p, r: listed.append(p), gpu_decoder=GpuDecoder(decoder, DEVICE)
    )  # type: ignore[arg-type]
    (batch,) = feed.batches([(0, np.arange(6))], lambda e, k, s: plan_batch(settings, e, k, s))
    assert asked == [odd]
    assert listed == []
    expected = decoder(odd)
    actual = batch.packed.bytes[batch.packed.offsets[4] :][: expected.size].cpu().numpy()
    assert np.array_equal(actual, expected.reshape(-1))


def test_a_batch_has_a_stream_of_its_own_and_waits_before_each_call_of_the_decoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where files are decoded one by one: those that are turned upright are still read by the stream."""
    from adclr.data import nvjpeg

    calls: list[str] = []
    real, cpu, gpu = nvjpeg._nvjpeg, torch.device("cpu"), torch.device("cuda:0")

    @contextmanager
    def stream(device: torch.device) -> Iterator[None]:
        assert device == gpu
        calls.append("begin")
        yield
        calls.append("end")

    def one_by_one(data: list[bytes], device: torch.device) -> list[torch.Tensor]:
        assert device == gpu
        calls.append(f"decode {len(data)}")
        if len(data) > 1:
            raise RuntimeError("nvJPEG: not all at once")
        return real(data, cpu)

    waiting = SimpleNamespace(synchronize=lambda: calls.append("wait"))
    monkeypatch.setattr(nvjpeg, "decoding_stream", stream)
    monkeypatch.setattr(nvjpeg, "_nvjpeg", one_by_one)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: waiting)
    decoder = GpuDecoder(Decoder(), gpu)
    items = [decoder.take(jpeg(0)), decoder.take(jpeg(1, orientation=6))]
    packed, failed = decoder.pack([item for item in items if item is not None])
    assert packed is not None
    assert not failed
    assert calls == ["begin", "wait", "decode 2", *["wait", "decode 1"] * 2, "end"]


@pytest.mark.parametrize(("subsampling", "near"), [(0, NEAR), (2, 2.0 if ON_GPU else 0.0)])
def test_photographs_are_pillows(subsampling: int, near: float) -> None:
    from sklearn.datasets import load_sample_images

    decoder = GpuDecoder(Decoder(), DEVICE)
    for photo in load_sample_images().images:
        buffer = io.BytesIO()
        Image.fromarray(photo).save(buffer, "JPEG", quality=92, subsampling=subsampling)
        item = decoder.take(buffer.getvalue())
        assert item is not None
        packed, _ = decoder.pack([item])
        assert packed is not None
        pillow = np.asarray(Image.open(buffer)).transpose(2, 0, 1)
        actual = packed.bytes.cpu().numpy().reshape(pillow.shape)
        assert np.abs(actual.astype(float) - pillow).mean() <= near
