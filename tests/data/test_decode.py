from __future__ import annotations

import contextlib
import io
import re
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.io
from PIL import Image, ImageOps

from adclr.config.parsing import UserError
from adclr.data.decode import Decoder, Pixels, Unreadable, size_of, to_bytes
from adclr.data.jpeg_header import read_header

LIMIT = 10**6


def decode(data: bytes, max_pixels: int) -> Pixels:
    return Decoder(max_pixels)(data)


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
    [
        b"",
        b"<html>no</html>",
        encoded(PHOTO, "JPEG")[:100],
        encoded(PHOTO, "JPEG")[:-2],
        encoded(PHOTO, "PNG")[:-30],
        bomb(),
        encoded(PHOTO, "PPM"),
    ],
    ids=["empty", "html", "truncated jpeg", "jpeg without its end", "truncated png", "bomb", "a format not listed"],
)
def test_what_cannot_be_used_is_refused_with_a_reason(data: bytes) -> None:
    with pytest.raises(Unreadable) as error:
        decode(data, LIMIT)
    assert str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert not re.search(r"\.cpp|__|/|\\n", str(error.value)), error.value  # where in its source a reader noticed


def test_the_limit_is_on_pixels(tmp_path: Path) -> None:
    del tmp_path
    with pytest.raises(Unreadable, match=r"30x20 pixels are more than data\.max_pixels=599"):
        decode(encoded(PHOTO, "PNG"), 599)
    assert decode(encoded(PHOTO, "PNG"), 600).shape == (3, 20, 30)


def photographs() -> list[bytes]:
    from sklearn import datasets

    folder = Path(datasets.__file__).parent / "images"
    return [path.read_bytes() for path in sorted(folder.glob("*.jpg"))]


def by_pillow(data: bytes, mode: str = "RGB") -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        array = np.asarray(ImageOps.exif_transpose(image).convert(mode))
    return array.transpose(2, 0, 1) if array.ndim == 3 else array[None]


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 20}])
def test_photographs_decode_as_pillow_decodes_them(options: dict[str, object]) -> None:
    assert len(photographs()) == 2
    for data in photographs():
        with Image.open(io.BytesIO(data)) as photo:
            again = encoded(photo, "JPEG", **options)
        assert np.array_equal(Decoder()(again), by_pillow(again))
        gray = Decoder(num_channels=1)(again)
        assert abs(gray.astype(int) - by_pillow(again, "L")).mean() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_every_orientation_is_turned_upright_alike(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(PHOTO, kind, exif=exif)
    assert np.array_equal(decode(data, LIMIT), by_pillow(data))
    if kind == "JPEG":
        header = read_header(data)
        assert header is not None
        assert (header.height, header.width, header.orientation, header.plain) == (20, 30, orientation, True)


def test_large_jpegs_are_decoded_smaller() -> None:
    (photo, *_) = photographs()  # 427x640
    whole = Decoder()(photo)
    assert whole.shape == (3, 427, 640)
    for above, shape in ((214, (427, 640)), (213, (214, 320)), (100, (107, 160)), (50, (54, 80)), (1, (54, 80))):
        small = Decoder(shrink_above=above)(photo)
        assert small.shape == (3, *shape)
        assert min(small.shape[1:]) >= min(above, 53)
    with Image.open(io.BytesIO(photo)) as image:
        resized = np.asarray(image.resize((320, 214), Image.Resampling.BOX)).transpose(2, 0, 1)
    assert abs(Decoder(shrink_above=213)(photo).astype(int) - resized).mean() < 8
    turned = Image.Exif()
    turned[0x0112] = 6
    with Image.open(io.BytesIO(photo)) as image:
        data = encoded(image, "JPEG", exif=turned)
    assert Decoder(shrink_above=213)(data).shape == (3, 320, 214)
    assert Decoder(shrink_above=10)(encoded(PHOTO, "PNG")).shape == (3, 20, 30)  # a JPEG only


@pytest.mark.parametrize(
    ("values", "max_value", "expected"),
    [
        ([0, 4095], None, [0, 255]),  # 12 bits
        ([0, 2048, 1], None, [0, 128, 0]),
        ([0, 4096, 65535], None, [0, 16, 255]),
        ([7, 255], None, [7, 255]),  # 8 bits in 16
        ([0, 500, 1000, 2000], 1000, [0, 128, 255, 255]),
    ],
)
def test_deep_images_follow_the_stated_rule(values: list[int], max_value: float | None, expected: list[int]) -> None:
    array = np.array([values], np.uint16)
    decoder = Decoder(max_value=max_value)
    assert decoder(encoded(Image.fromarray(array), "PNG"))[0].tolist() == [expected]
    assert decoder(encoded(Image.fromarray(array), "TIFF"))[2].tolist() == [expected]
    colors = torch.from_numpy(np.stack([array] * 3)).to(torch.uint16)
    assert decoder(deep_png(colors.numpy())).tolist() == [[expected]] * 3
    assert Decoder(num_channels=1, max_value=max_value)(deep_png(colors.numpy())).tolist() == [[expected]]


def deep_png(pixels: np.ndarray) -> bytes:
    """A PNG file of 16 bits a color, 3×height×width, which Pillow cannot write."""
    _, height, width = pixels.shape
    rows = pixels.transpose(1, 2, 0).astype(">u2")
    raw = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([16, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


def test_fractions_have_white_at_one_and_nothing_overflows() -> None:
    assert to_bytes(np.array([0.0, 0.5, 1.0], np.float32), None).tolist() == [0, 128, 255]
    assert to_bytes(np.array([-5.0, 300.0, 1023.0]), None).tolist() == [0, 75, 255]
    assert to_bytes(np.array([0, 10**9], np.int64), None).tolist() == [0, 255]


def tiff(pixels: np.ndarray, **options: object) -> bytes:
    import tifffile

    buffer = io.BytesIO()
    tifffile.imwrite(buffer, pixels, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_image_with_numbers_that_are_not_finite_is_refused(value: float) -> None:
    pixels = np.full((10, 12), 0.5, np.float32)
    assert decode(tiff(pixels), LIMIT).shape == (3, 10, 12)
    pixels[3, 4:6] = value
    bands = np.stack([pixels] * 5, axis=-1)
    for decoder, data, size in (
        (Decoder(), tiff(pixels), "2 of its 120"),
        (Decoder(num_channels=5), tiff(bands, photometric="minisblack", planarconfig="contig"), "10 of its 600"),
    ):
        with pytest.raises(Unreadable) as error:
            decoder(data)
        assert str(error.value) == f"{size} numbers are NaN or infinite; replace them, for example by 0"


def test_reasons_are_sentences_without_the_names_of_python() -> None:
    webp = bytearray(encoded(PHOTO, "WEBP"))
    webp[20:60] = bytes(40)
    part = bytearray(encoded(PHOTO, "PNG"))
    part[13] = 10  # a line feed in the name of a part
    for data in (bytes(webp), bytes(part)):
        with pytest.raises(Unreadable) as error:
            decode(data, LIMIT)
        assert re.fullmatch(r"(it cannot be decoded|broken PNG)[\w ():]+", str(error.value)), error.value
        assert "Error" not in str(error.value)


@pytest.mark.parametrize("num_channels", [1, 3])
def test_a_file_of_bands_is_told_from_what_is_no_image(num_channels: int) -> None:
    pixels = np.arange(5 * 12 * 14).reshape(12, 14, 5)
    for bands in (pixels.astype(np.uint8), pixels.astype(np.uint16)):
        for options in ({}, {"bigtiff": True}, {"byteorder": ">"}):
            data = tiff(bands, photometric="minisblack", planarconfig="contig", **options)
            with pytest.raises(Unreadable) as error:
                Decoder(num_channels=num_channels)(data)
            assert str(error.value) == (
                f"a TIFF file of 5 bands where model.num_channels={num_channels}; "
                "set model.num_channels=5 to read all of them"
            )
    with pytest.raises(Unreadable, match="broken TIFF: it is cut off"):  # so that nobody knows its bands
        Decoder(num_channels=num_channels)(data[:40])


def test_numbers_that_pillow_does_not_know() -> None:
    rng = np.random.default_rng(0)
    colors, gray = rng.random((12, 14, 3)).astype(np.float32), rng.random((12, 14))
    assert np.array_equal(Decoder()(tiff(colors, photometric="rgb")), (colors * 255).round().transpose(2, 0, 1))
    assert Decoder(num_channels=1)(tiff(colors, photometric="rgb")).shape == (1, 12, 14)
    assert np.array_equal(Decoder()(tiff(gray)), np.stack([(gray * 255).round()] * 3))
    assert np.array_equal(Decoder(num_channels=1)(tiff(gray)), (gray * 255).round()[None])


def test_a_missing_package_is_no_fault_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    bands = np.zeros((12, 14, 5), np.uint8)
    data = bytearray(tiff(bands, photometric="minisblack", planarconfig="contig", metadata=None))
    compression = data.index((259).to_bytes(2, "little") + (3).to_bytes(2, "little"))
    data[compression + 8] = 5  # it says it is compressed by LZW, for which tifffile needs another package
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    with pytest.raises(UserError, match=r"needs imagecodecs, which is not installed; run: pip install imagecodecs$"):
        Decoder(num_channels=5)(bytes(data))
    deep = tiff(np.zeros((12, 14, 3), np.uint16), photometric="rgb")
    monkeypatch.setitem(sys.modules, "tifffile", None)
    for decoder, file in ((Decoder(num_channels=5), bytes(data)), (Decoder(), deep)):
        with pytest.raises(
            UserError, match=r"needs tifffile, which is not installed; run: pip install 'adclr\[multiband\]'$"
        ):
            decoder(file)
    assert Decoder()(encoded(PHOTO, "TIFF")).shape == (3, 20, 30)  # which Pillow reads
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    with pytest.raises(UserError, match=r"needs torchvision\.io, which is not installed; run: pip install adclr$"):
        Decoder()(encoded(PHOTO, "JPEG"))


@pytest.mark.parametrize("axis", [0, -1])
def test_images_of_many_bands(axis: int) -> None:
    import tifffile

    bands = (np.arange(5 * 12 * 14) % 4096).reshape(5, 12, 14).astype(np.uint16)
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, np.moveaxis(bands, 0, axis), photometric="minisblack")
    pixels = Decoder(num_channels=5, max_value=4095)(buffer.getvalue())
    assert np.array_equal(pixels, (bands * (255 / 4095)).round().astype(np.uint8))
    with pytest.raises(Unreadable, match=r"model\.num_channels=7"):
        Decoder(num_channels=7)(buffer.getvalue())
    with pytest.raises(Unreadable, match="max_pixels"):
        Decoder(100, num_channels=5)(buffer.getvalue())
    with pytest.raises(Unreadable):
        Decoder(num_channels=5)(encoded(PHOTO, "JPEG"))


@pytest.mark.parametrize(
    "options", [{"planarconfig": "separate"}, {"planarconfig": "contig"}, {"planarconfig": "contig", "bigtiff": True}]
)
def test_the_size_of_a_file_of_bands_is_in_its_header(options: dict[str, object]) -> None:
    import tifffile

    buffer, first = io.BytesIO(), options.get("planarconfig") == "separate"
    tifffile.imwrite(
        buffer, np.zeros((5, 12, 14) if first else (12, 14, 5), np.uint16), photometric="minisblack", **options
    )
    assert size_of(buffer.getvalue()) == (12, 14)
    with pytest.raises(Unreadable):
        size_of(buffer.getvalue()[:8])


def test_headers_that_lie_are_no_way_in() -> None:
    good = encoded(PHOTO, "JPEG")
    assert read_header(b"") is None
    assert read_header(b"\xff\xd8\xff") is None
    assert read_header(encoded(PHOTO, "PNG")) is None
    rng = np.random.default_rng(0)
    for _ in range(300):  # broken anywhere: pixels, or a reason; never anything else
        data = bytearray(good)
        for place in rng.integers(2, len(data), rng.integers(1, 6)):
            data[place] = rng.integers(256)
        with contextlib.suppress(Unreadable):
            assert Decoder(10**6)(bytes(data)).dtype == np.uint8


def hidden_frame() -> bytes:
    """A JPEG whose small frame header stands in a place that decoders pass over."""
    good = encoded(PHOTO.resize((200, 200)), "JPEG")
    fake = b"\xff\x00\x00\x04\x00\x00" + b"\xff\xc0\x00\x0b\x08\x00\x08\x00\x08\x01\x01\x11\x00"
    return good[:2] + fake + good[2:]


def early_chunk() -> bytes:
    """A PNG with a chunk before its header that claims to be small."""
    data = deep_png(np.zeros((3, 100, 100), np.uint16))
    body = b"abCd" + (5).to_bytes(4, "big") * 2 + bytes([16, 2, 0, 0, 0])
    return data[:8] + (13).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big") + data[8:]


@pytest.mark.parametrize("data", [hidden_frame(), early_chunk()], ids=["jpeg", "png"])
def test_the_limit_cannot_be_got_round(data: bytes) -> None:
    assert read_header(data) is None  # no decoder that could see another size is asked
    with pytest.raises(Unreadable):
        Decoder(1000)(data)


def test_deep_colors_in_tiff_and_gray_with_transparency() -> None:
    import tifffile

    values = np.array([[0, 2048, 4095]], np.uint16)
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, np.stack([values] * 3, axis=-1), photometric="rgb")
    assert Decoder(max_value=4095)(buffer.getvalue())[1].tolist() == [[0, 128, 255]]
    assert Decoder(num_channels=1, max_value=4095)(buffer.getvalue())[0].tolist() == [[0, 128, 255]]
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, values, photometric="miniswhite")
    assert Decoder(max_value=4095)(buffer.getvalue())[0].tolist() == [[255, 127, 0]]


def test_orientation_is_the_same_by_every_way() -> None:
    import tifffile

    bands = (np.arange(5 * 4 * 6) % 255).reshape(5, 4, 6).astype(np.uint8)
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, bands, photometric="minisblack", extratags=[(274, "H", 1, 6, True)])
    turned = Decoder(num_channels=5)(buffer.getvalue())
    assert np.array_equal(turned, np.rot90(bands, -1, axes=(1, 2)))
    exif = Image.Exif()
    exif[0x0112] = 6
    large = PHOTO.resize((300, 200))
    data = encoded(large, "JPEG", exif=exif)
    assert Decoder()(data).shape == (3, 300, 200)
    assert Decoder(shrink_above=50)(data).shape == (3, 75, 50)


def claiming(data: bytes, height: int, width: int) -> bytes:
    """A JPEG whose header says another size than it has."""
    lying = bytearray(data)
    frame = max(lying.find(marker) for marker in (b"\xff\xc0\x00", b"\xff\xc2\x00"))
    lying[frame + 5 : frame + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(lying)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 98}])
@pytest.mark.parametrize("shrink_above", [None, 50])
def test_a_jpeg_that_claims_more_pixels_than_it_has_is_refused(
    options: dict[str, object], shrink_above: int | None
) -> None:
    decoder = Decoder(shrink_above=shrink_above)
    for data in photographs():  # 427x640
        with Image.open(io.BytesIO(data)) as photo:
            good = encoded(photo, "JPEG", **options)
        assert decoder(good).shape[0] == 3
        for size in ((427 + 40, 640), (427, 640 + 40), (854, 1280), (500, 600)):
            with pytest.raises(Unreadable, match=r"^broken JPEG: it ends before all the pixels that its header says$"):
                decoder(claiming(good, *size))
        with pytest.raises(Unreadable, match=r"^broken JPEG: 9900x9900 pixels do not fit into its bytes$"):
            decoder(claiming(encoded(PHOTO, "JPEG", **options), 9900, 9900))
        for size in ((400, 600), (430, 639)):  # nothing is missing: shown as the header says, no crash, no hang
            assert decoder(claiming(good, *size)).shape[0] == 3


@pytest.mark.parametrize("num_channels", [1, 3])
def test_a_jpeg_of_four_inks_that_is_cut_off_and_closed_is_refused(num_channels: int) -> None:
    decoder = Decoder(num_channels=num_channels)
    for data in photographs():
        with Image.open(io.BytesIO(data)) as photo:
            whole = encoded(photo.convert("CMYK"), "JPEG")
        assert decoder(whole).shape == (num_channels, 427, 640)
        for share in (0.3, 0.9):
            with pytest.raises(Unreadable, match="ends before all the pixels"):
                decoder(whole[: int(len(whole) * share)] + b"\xff\xd9")
    gray = encoded(Image.new("CMYK", (64, 48), (128, 128, 128, 128)), "JPEG")  # as missing data, but all there
    assert decoder(gray).shape == (num_channels, 48, 64)


@pytest.mark.parametrize("color", [(128, 128, 128), (0, 0, 0), (255, 255, 255)])
@pytest.mark.parametrize("progressive", [False, True])
def test_plain_colors_are_no_missing_pixels_and_fit_into_few_bytes(
    color: tuple[int, int, int], progressive: bool
) -> None:
    data = encoded(Image.new("RGB", (3000, 2000), color), "JPEG", progressive=progressive, optimize=True)
    assert (Decoder()(data) == color[0]).all()
    assert (Decoder(shrink_above=400)(data) == color[0]).all()
    assert (Decoder(num_channels=1)(data + b"\0" * 9) == color[0]).all()


def test_what_is_not_what_was_written_into_a_png_is_refused() -> None:
    palette = PHOTO.convert("P")
    files = {b"IDAT": encoded(PHOTO, "PNG"), b"PLTE": encoded(palette, "PNG"), b"IHDR": encoded(PHOTO, "PNG")}
    for kind, data in files.items():
        at = data.index(kind)
        sum_at = at + 4 + int.from_bytes(data[at - 4 : at], "big")
        broken = bytearray(data)
        broken[sum_at] ^= 0xFF
        assert decode(data, LIMIT).shape == (3, 20, 30)
        with pytest.raises(Unreadable, match=rf"^broken PNG: the checksum of its part {kind.decode()} is wrong$"):
            decode(bytes(broken), LIMIT)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_lack_of_memory_is_no_fault_of_the_file(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: object, **__: object) -> torch.Tensor:
        return torch.empty(2**60, dtype=torch.uint8)  # PyTorch's own error, which is not MemoryError

    def no_memory(*_: object, **__: object) -> Image.Image:
        raise MemoryError

    monkeypatch.setattr(torchvision.io, "decode_jpeg", too_much)
    monkeypatch.setattr(Image, "open", no_memory)
    with pytest.raises(MemoryError):
        decode(encoded(PHOTO, kind), LIMIT)
