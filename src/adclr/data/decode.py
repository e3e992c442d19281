"""Decoding of image files to uint8 pixels, C×height×width; only listed formats are opened, up to a set size.

JPEG goes through torchvision's libjpeg, which leaves Python's lock and is 1.6 times as fast as Pillow with the same
pixels; everything else, and every JPEG that is not plain, through Pillow; images of 2 or of more than 3 channels
through tifffile. EXIF orientation is applied to all of them.

An image with values that are not finite is refused, and so is a file of more bands than `model.num_channels`. A
missing package raises `UserError`, since the file is not to blame.

A JPEG that ends before all the pixels of its header is refused, even if only one block in the corner is missing. One
whose header states fewer pixels than it has, or so few more that no block is missing, cannot be told from a good one:
libjpeg only warns. It is decoded to the size in its header.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
import zlib
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from adclr.config.parsing import UserError
from adclr.data.jpeg_header import Header, read_header
from adclr.system import optional

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
ORIENTATION = 0x0112  # the tag of EXIF
DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # Pillow's modes of more than 8 bits
WHITES = (255, 1023, 4095, 16383, 65535)  # the value of white in images of 8, 10, 12, 14 and 16 bits
PNG = b"\x89PNG\r\n\x1a\n"
TIFF, BIG_TIFF = (b"II*\0", b"MM\0*"), (b"II+\0", b"MM\0+")
# First bytes of files; BMP has two letters only, with which texts begin too
BEGINNINGS = {"JPEG": (b"\xff\xd8\xff",), "PNG": (PNG,), "TIFF": TIFF + BIG_TIFF, "GIF": (b"GIF87a", b"GIF89a")}
WIDTH, HEIGHT, SAMPLES, EXTRA_SAMPLES = 256, 257, 277, 338  # tags of TIFF; extra samples are those beyond the colors
OFFSETS = (273, 324)  # tags with the offsets of strips or tiles
ALPHA = (1, 2)  # values of EXTRA_SAMPLES
MISSING = 128  # the value of all channels that libjpeg gives pixels beyond the end of a file
INK_MISSING = {MISSING, 255 - MISSING}  # the same in files of four inks, as stored or reversed
FILLER = bytes(range(16, 240, 3))  # data that contain no marker and are not all zero
A_TIFF = "a TIFF file among the images"  # in errors about missing packages
# EXIF orientations whose rows are columns, and those whose columns or rows are reversed
TRANSPOSED, COLUMNS_FLIPPED, ROWS_FLIPPED = (5, 6, 7, 8), (2, 3, 6, 7), (3, 4, 7, 8)
Pixels = NDArray[np.uint8]  # C×height×width
BICUBIC = Image.Resampling.BICUBIC

# Our own limit is checked before decoding; Pillow's would hold for every caller in the process.
Image.MAX_IMAGE_PIXELS = None
# Of a damaged file `Unreadable` says what is wrong; these would print it too, without the name of the file.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
logging.getLogger("tifffile").setLevel(logging.CRITICAL)


class Unreadable(Exception):
    """An image cannot be used; the message is the reason."""


@dataclass(frozen=True)
class Decoder:
    """`decoder(data)` returns pixels or raises `Unreadable`."""

    max_pixels: int = 100_000_000
    num_channels: int = 3
    max_value: float | None = None  # white in images of more than 8 bits; None: as `to_bytes` says
    shrink_above: int | None = None  # a JPEG is decoded smaller while its shorter side stays at least this
    max_side: int | None = None  # a larger image is resized to this longer side

    def __call__(self, data: bytes) -> Pixels:
        """Decode a file."""
        pixels = self._decode(data)
        side = max(pixels.shape[1:])
        if self.max_side is None or side <= self.max_side:
            return pixels
        height, width = (max(1, round(n * self.max_side / side)) for n in pixels.shape[1:])
        return resize_channels(pixels, height, width)

    def _decode(self, data: bytes) -> Pixels:
        try:
            header = read_header(data)
            if header is not None:
                self._check(header.height, header.width)
                if not header.fits(data):
                    raise Unreadable(f"broken JPEG: {header.width}x{header.height} pixels do not fit into its bytes")
            if data.startswith(PNG):
                _check_sums(data)
            if header is not None and header.plain and self.num_channels in (1, 3):
                return self._jpeg(data, header, self._reduction(header))
            if self.num_channels not in (1, 3):
                return self._bands(data)
            return self._deep_png(data) if _is_deep_png(data) else self._pillow(data, header)
        # there may be more memory the next time, and a package can be installed; the file is not to blame
        except (Unreadable, UserError, MemoryError):
            raise
        except ImportError as error:  # also of a package that adclr always needs
            raise optional.not_installed(error.name or "a package", "adclr", "decoding") from None
        except UnidentifiedImageError:
            raise Unreadable(_unknown(data)) from None
        # Decoders raise far more kinds of error on broken files than they document (SyntaxError, IndexError, ...)
        except Exception as error:
            _check_memory(error)
            raise Unreadable(_reason(error, data)) from None

    def _check(self, height: int, width: int) -> None:
        if width * height > self.max_pixels:
            raise Unreadable(f"{width}x{height} pixels are more than data.max_pixels={self.max_pixels}")

    def _reduction(self, header: Header) -> int:
        """Return 2, 4 or 8 where the image stays large enough, else 1; libjpeg then computes fewer pixels."""
        if self.shrink_above is None:
            return 1
        fitting = [r for r in (8, 4, 2) if min(header.height, header.width) // r >= self.shrink_above]
        return fitting[0] if fitting else 1

    def keeps(self, header: Header) -> bool:
        """Return whether an image is decoded at the size in its header."""
        side = max(header.height, header.width)
        return self._reduction(header) == 1 and (self.max_side is None or side <= self.max_side)

    def _jpeg(self, data: bytes, header: Header, reduction: int) -> Pixels:
        try:
            if reduction > 1:
                pixels = self._pillow(data, replace(header, orientation=1), reduction)
            else:
                pixels = self._libjpeg(data)
            if reduction == 1 and pixels.shape[1:] != (header.height, header.width):
                raise Unreadable("broken JPEG: its header says another size than its pixels have")
            if (pixels[:, -1, -1] == MISSING).all():
                self._check_end(data)
        except RuntimeError as error:
            _check_memory(error)
            raise Unreadable(f"broken JPEG: {_sentence(error)}") from None
        return np.ascontiguousarray(turn_upright(pixels, header.orientation))

    def _check_end(self, data: bytes) -> None:
        """Refuse a JPEG that ends before its last pixel, which libjpeg fills with gray and only warns.

        Few images have this gray in their last corner. More data are inserted before the end of these; pixels that
        change by that were not in the file.
        """
        end = data.rfind(b"\xff\xd9")
        # by Pillow: torchvision lets libjpeg print a warning about the inserted bytes
        if end >= 0 and (_by_pillow(data) != _by_pillow(data[:end] + FILLER + data[end:])).any():
            raise Unreadable("broken JPEG: it ends before all the pixels that its header says")

    def _libjpeg(self, data: bytes) -> Pixels:
        import torch
        from torchvision.io import ImageReadMode, decode_jpeg

        mode = ImageReadMode.GRAY if self.num_channels == 1 else ImageReadMode.RGB
        pixels: Pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=mode).numpy()
        return pixels

    def _pillow(self, data: bytes, header: Header | None, reduction: int = 1) -> Pixels:
        """Decode by Pillow; transparency is dropped, of an animation the first frame is used."""
        try:
            opened = Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:
            return self._other_tiff(data)
        with opened as image:
            self._check(image.height, image.width)
            if reduction > 1:
                image.draft(None, (image.width // reduction, image.height // reduction))
            tags = getattr(image, "tag_v2", {})
            if is_deep(image, data):
                return self._deep_tiff(data)
            image.load()
            if header is not None and not header.plain and set(_last_pixel(image)) <= INK_MISSING:
                self._check_end(data)
            if image.mode in DEEP_MODES:
                gray = to_bytes(np.asarray(image), self.max_value)
                pixels = np.repeat((255 - gray if tags.get(262) == 0 else gray)[None], self.num_channels, axis=0)
            else:
                mode = "L" if self.num_channels == 1 else "RGB"
                array = np.asarray(image if image.mode == mode else image.convert(mode))
                pixels = array.transpose(2, 0, 1) if array.ndim == 3 else array[None]
            orientation = header.orientation if header is not None else _orientation(image)
            return np.array(turn_upright(pixels, orientation), order="C")  # a copy, not Pillow's memory

    def _deep_tiff(self, data: bytes) -> Pixels:
        """Decode colors of 16 bits, of which Pillow would keep the upper 8."""
        pixels = Decoder(self.max_pixels, 3, self.max_value)._bands(data, at_least=True)
        return pixels if self.num_channels == 3 else _to_gray(pixels).round().astype(np.uint8)

    def _other_tiff(self, data: bytes) -> Pixels:
        """Decode a TIFF file of a type that Pillow does not know, such as colors of 32 bits; gray or colors only."""
        bands = tiff_bands(data)
        if bands is None:
            raise UnidentifiedImageError
        if bands not in (1, 3):
            raise Unreadable(
                f"a TIFF file of {bands} bands where model.num_channels={self.num_channels}; "
                f"set model.num_channels={bands} to read all of them"
            )
        pixels = replace(self, num_channels=bands)._bands(data, at_least=bands == 3)
        if bands < self.num_channels:
            return np.repeat(pixels, self.num_channels, axis=0)
        return pixels if bands == self.num_channels else _to_gray(pixels).round().astype(np.uint8)

    def _deep_png(self, data: bytes) -> Pixels:
        """Decode colors of 16 bits, of which Pillow would keep the upper 8."""
        import torch
        from torchvision.io import ImageReadMode, decode_png

        self._check(int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big"))
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        deep = decode_png(encoded, mode=ImageReadMode.RGB).to(torch.int32).numpy()
        if self.num_channels == 1:
            deep = _to_gray(deep).round().astype(np.int32)
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            return np.array(turn_upright(to_bytes(deep, self.max_value), _orientation(image)), order="C")

    def _bands(self, data: bytes, at_least: bool = False) -> Pixels:
        """Decode a TIFF file of any number of channels, first or last; `at_least` drops one more (transparency)."""
        with optional.require("tifffile", "multiband", A_TIFF).TiffFile(io.BytesIO(data)) as file:
            series = file.series[0]
            shape, count = tuple(int(n) for n in series.shape), self.num_channels
            if len(shape) == 2:
                shape = (1, *shape)
            most = count + 1 if at_least else count
            channels = [axis for axis in (0, -1) if len(shape) == 3 and count <= shape[axis] <= most]
            if not channels:
                raise Unreadable(f"an array of {shape} does not have model.num_channels={self.num_channels} channels")
            others = [n for axis, n in enumerate(shape) if axis != channels[0] % 3]
            self._check(*others)
            try:
                array = np.moveaxis(series.asarray().reshape(shape), channels[0], 0)[:count]
            except ValueError as error:
                if "imagecodecs" in str(error) and find_spec("imagecodecs") is None:
                    raise optional.not_installed("imagecodecs", "imagecodecs", A_TIFF) from None
                raise
            tag = file.pages[0].tags.get(ORIENTATION)
        array = array if array.dtype == np.uint8 else to_bytes(array, self.max_value)
        return np.ascontiguousarray(turn_upright(array, 1 if tag is None else int(tag.value)))


def resize_channels(pixels: Pixels, height: int, width: int, how: Image.Resampling = BICUBIC) -> Pixels:
    """Resize each channel by Pillow."""
    channels = (Image.fromarray(channel).resize((width, height), how) for channel in pixels)
    return np.stack([np.asarray(channel) for channel in channels])


def to_bytes(values: NDArray[Any], max_value: float | None) -> NDArray[np.uint8]:
    """Convert values of more than 8 bits to bytes: 0 is black, `max_value` white, linear in between.

    Without a `max_value`, white is the least of 255, 1023, 4095, 16383 and 65535 (8 to 16 bits) that the largest number
    of the image does not exceed, so that 12 bits in a file of 16 are not nearly black; fractions up to 1 have white 1.
    An image with values that are not finite is refused: they, or all others, would become black.
    """
    numbers = values.astype(np.float64)
    finite = np.isfinite(numbers)
    if not finite.all():
        bad = finite.size - int(finite.sum())
        raise Unreadable(f"{bad} of its {finite.size} numbers are NaN or infinite; replace them, for example by 0")
    top = float(numbers.max(initial=0.0))
    if max_value is None:
        fractions = np.issubdtype(values.dtype, np.floating) and top <= 1
        max_value = 1.0 if fractions else next((float(white) for white in WHITES if top <= white), top)
    return np.asarray((numbers * (255.0 / max_value)).clip(0, 255).round().astype(np.uint8))


def _last_pixel(image: Image.Image) -> tuple[int, ...]:
    value: Any = image.getpixel((image.width - 1, image.height - 1))
    return value if isinstance(value, tuple) else (value,)


def _by_pillow(data: bytes) -> NDArray[Any]:
    with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
        return np.asarray(image)


def _check_sums(data: bytes) -> None:
    """Refuse a PNG with a wrong checksum in a critical chunk; Pillow checks some of them only.

    That takes 3 % of the time of decoding. Missing chunks are left to Pillow.
    """
    start, view = len(PNG), memoryview(data)
    while start + 12 <= len(data):
        length, kind = int.from_bytes(data[start : start + 4], "big"), data[start + 4 : start + 8]
        end = start + 8 + length
        if end + 4 > len(data):
            return
        critical = kind[0] & 0x20 == 0  # a capital letter, as in IHDR, PLTE, IDAT
        if critical and zlib.crc32(view[start + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            part = f"its part {kind.decode()}" if kind.isalpha() else "one of its parts"
            raise Unreadable(f"broken PNG: the checksum of {part} is wrong")
        if kind == b"IEND":
            return
        start = end + 4


def _check_memory(error: Exception) -> None:
    """Raise `MemoryError` for PyTorch's error, which has no type of its own."""
    if "DefaultCPUAllocator" in str(error):
        raise MemoryError(str(error)) from None


def _sentence(error: Exception) -> str:
    """Return the first line of a decoder's message, without the source line that torchvision puts before it."""
    first = (str(error).splitlines() or [""])[0]
    return re.sub(r"^.*\.(?:cpp|cc|h):\d+\W*", "", first)[:200]


def _unknown(data: bytes) -> str:
    """Return why no decoder takes a file: its header is damaged, or its format is another one."""
    for name, beginnings in BEGINNINGS.items():
        if data.startswith(beginnings):
            return f"broken {name}: it is cut off, or its header is damaged"
    return f"it is not an image of a known format ({', '.join(FORMATS)})"


def _reason(error: Exception, data: bytes) -> str:
    """Return why a file cannot be decoded, in plain words."""
    text = _sentence(error)
    cut_webp = data[:4] + data[8:12] == b"RIFFWEBP" and len(data) < 8 + int.from_bytes(data[4:8], "little")
    if cut_webp or re.search("truncat|failed to read", text.lower()):
        return "the file is cut off: it ends before its last pixel"
    if data.startswith(TIFF + BIG_TIFF) and _tiff_tags(data) is None:
        return _unknown(data)
    return f"it cannot be decoded ({text})" if text else "it cannot be decoded"


def tiff_bands(data: bytes) -> int | None:
    """Return the number of bands of a TIFF file, without transparency; None if it is none or broken."""
    tags = _tiff_tags(data)
    try:
        if tags is None or not any(part in tags for part in OFFSETS):
            return None
        return int(tags.get(SAMPLES, 1)) - sum(kind in ALPHA for kind in tags.get(EXTRA_SAMPLES, ()))
    except Exception:  # many kinds, where it is broken
        return None


def _tiff_tags(data: bytes) -> ImageFileDirectory_v2 | None:
    """Return the tags of the first page of a TIFF file, with width and height; None if it is none or broken."""
    if not data.startswith(TIFF + BIG_TIFF):
        return None
    try:
        tags, file = ImageFileDirectory_v2(data[: 16 if data.startswith(BIG_TIFF) else 8]), io.BytesIO(data)
        file.seek(tags.next)
        tags.load(file)
        return tags if WIDTH in tags and HEIGHT in tags else None
    except Exception:  # many kinds, where it is broken
        return None


def is_deep(image: Image.Image, data: bytes) -> bool:
    """Return whether an image has colors of more than 8 bits, which Pillow's mode does not say."""
    bits = getattr(image, "tag_v2", {}).get(258, (8,))
    return image.mode not in DEEP_MODES and (max(bits) > 8 or _is_deep_png(data))


def _is_deep_png(data: bytes) -> bool:
    """Return whether a PNG has 16 bits of color, or of gray with transparency, and its header first, as it must be."""
    return data.startswith(PNG + b"\0\0\0\rIHDR") and len(data) > 25 and data[24] == 16 and data[25] in (2, 4, 6)


def _to_gray(pixels: NDArray[Any]) -> NDArray[Any]:
    """Return 1×height×width luma by ITU-R 601, as Pillow converts colors to gray."""
    return np.tensordot(np.array([[0.299, 0.587, 0.114]]), pixels, 1)


def _orientation(image: Image.Image) -> int:
    return int(image.getexif().get(ORIENTATION, 1))


def turn_upright(pixels: Any, orientation: int, library: Any = np) -> Any:
    """Turn C×height×width pixels upright by their EXIF orientation; an array, or a tensor if `library` is torch."""
    if orientation in TRANSPOSED:
        pixels = library.swapaxes(pixels, 1, 2)
    if orientation in COLUMNS_FLIPPED:
        pixels = library.flip(pixels, (2,))
    if orientation in ROWS_FLIPPED:
        pixels = library.flip(pixels, (1,))
    return pixels


def size_of(data: bytes) -> tuple[int, int]:
    """Return (height, width) as stored, from the header alone."""
    header = read_header(data)
    if header is not None:
        return header.height, header.width
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.height, image.width
    except Exception as error:  # also of a TIFF file of bands, which Pillow does not know
        tags = _tiff_tags(data)
        if tags is None:
            raise Unreadable(type(error).__name__) from None
        return int(tags[HEIGHT]), int(tags[WIDTH])
