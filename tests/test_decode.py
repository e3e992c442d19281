from __future__ import annotations

import io
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from adclr.decode import Unreadable, decode, size_of

LIMIT = 10**6


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


PHOTO = Image.fromarray((np.arange(20 * 30 * 3) % 251).reshape(20, 30, 3).astype(np.uint8))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "JPEG", "WEBP", "GIF"])
def test_formats(kind: str) -> None:
    data = encoded(PHOTO, kind)
    pixels = decode(data, LIMIT)
    assert pixels.shape == (3, 20, 30)
    assert size_of(data) == (20, 30)
    if kind in ("PNG", "BMP", "TIFF"):
        assert np.array_equal(pixels.transpose(1, 2, 0), np.asarray(PHOTO))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_modes(mode: str) -> None:
    kind = "TIFF" if mode == "CMYK" else "PNG"
    assert decode(encoded(PHOTO.convert(mode), kind), LIMIT).shape == (3, 20, 30)


def test_sixteen_bits_are_scaled_not_crushed() -> None:
    values = np.array([[0, 257, 32768, 65535]], np.uint16)
    pixels = decode(encoded(Image.fromarray(values), "PNG"), LIMIT)
    assert pixels[0].tolist() == [[0, 1, 128, 255]]


def test_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    pixels = decode(encoded(PHOTO, "PNG", exif=exif), LIMIT)
    assert pixels.shape == (3, 30, 20)
    assert np.array_equal(pixels.transpose(1, 2, 0), np.rot90(np.asarray(PHOTO), -1))


def bomb() -> bytes:
    """A PNG whose header claims 30000x30000 pixels."""
    data = bytearray(encoded(PHOTO, "PNG"))
    data[16:24] = (30000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [b"", b"<html>no</html>", encoded(PHOTO, "JPEG")[:100], encoded(PHOTO, "PNG")[:-30], bomb(), encoded(PHOTO, "PPM")],
    ids=["empty", "html", "truncated jpeg", "truncated png", "bomb", "a format not listed"],
)
def test_what_cannot_be_used_is_refused_with_a_reason(data: bytes) -> None:
    with pytest.raises(Unreadable) as error:
        decode(data, LIMIT)
    assert str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_the_limit_is_on_pixels(tmp_path: Path) -> None:
    del tmp_path
    with pytest.raises(Unreadable, match=r"30x20 pixels are more than data\.max_pixels=599"):
        decode(encoded(PHOTO, "PNG"), 599)
    assert decode(encoded(PHOTO, "PNG"), 600).shape == (3, 20, 30)
