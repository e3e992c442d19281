"""Bytes -> uint8 image, C×height×width. Only listed formats are opened, and no picture of more than a set size.

JPEG goes through torchvision's libjpeg, which leaves Python's lock and is 1.6 times as fast as Pillow with the same
pixels; everything else, and every JPEG that is not plain, through Pillow; images of 2 or of more than 3 channels
through tifffile. EXIF orientation is applied alike everywhere.

An image with numbers that are not finite is refused, and so is a file of more bands than `model.num_channels`. A
missing package is the user's error (`UserError`), not the file's.

A JPEG that ends before all the pixels its header claims is refused, from one block in the corner on. One that claims
fewer than it has, or only so many more that no block is missing, cannot be told from a good one without another decoder
than libjpeg, which warns and goes on: it is shown as its header says.
"""

from __future__ import annotations

import io
import re
import zlib
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from adclr.config.sections import UserError
from adclr.data.jpeg import Header, read_header
from adclr.system import optional

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
ORIENTATION = 0x0112  # the tag of EXIF
DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # Pillow's, of more than 8 bits
DEEP = (255, 1023, 4095, 16383, 65535)  # what white can be in images of more than 8 bits
PNG = b"\x89PNG\r\n\x1a\n"
TIFF, BIG_TIFF = (b"II*\0", b"MM\0*"), (b"II+\0", b"MM\0+")
WIDTH, HEIGHT, SAMPLES, EXTRA_SAMPLES = 256, 257, 277, 338  # tags of TIFF; of samples, those beyond the colors
PARTS = (273, 324)  # tags that say where strips or tiles lie
ALPHA = (1, 2)  # of EXTRA_SAMPLES
MISSING = 128  # what libjpeg shows in all colours where a file has no more data
MORE = bytes(range(16, 240, 3))  # data that are no marker and not all nought
A_TIFF = "a TIFF file among the images"  # in errors about missing packages
Pixels = NDArray[np.uint8]  # C×height×width

# Our own limit is checked before decoding; Pillow's would be the same for every caller of the process.
Image.MAX_IMAGE_PIXELS = None


class Unreadable(Exception):
    """An image that cannot be used, with the reason."""


@dataclass(frozen=True)
class Decoder:
    """`decoder(data)` gives pixels or raises `Unreadable`."""

    max_pixels: int = 100_000_000
    num_channels: int = 3
    max_value: float | None = None  # white in images of more than 8 bits; None: see `to_bytes`
    shrink_above: int | None = None  # a JPEG is decoded smaller while its shorter side stays at least this
    max_side: int | None = None  # a larger image is resized to this longer side

    def __call__(self, data: bytes) -> Pixels:
        pixels = self._decode(data)
        side = max(pixels.shape[1:])
        if self.max_side is None or side <= self.max_side:
            return pixels
        height, width = (max(1, round(n * self.max_side / side)) for n in pixels.shape[1:])
        channels = (Image.fromarray(channel).resize((width, height), Image.Resampling.BICUBIC) for channel in pixels)
        return np.stack([np.asarray(channel) for channel in channels])

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
        # of memory there may be more the next time, and a package can be installed; the file is not to blame
        except (Unreadable, UserError, MemoryError):
            raise
        except UnidentifiedImageError:
            raise Unreadable(f"it is not an image of a known format ({', '.join(FORMATS)})") from None
        # Readers raise far more kinds of error on broken files than they document (SyntaxError, IndexError, ...)
        except Exception as error:
            _check_memory(error)
            raise Unreadable(_reason(error)) from None

    def _check(self, height: int, width: int) -> None:
        if width * height > self.max_pixels:
            raise Unreadable(f"{width}x{height} pixels are more than data.max_pixels={self.max_pixels}")

    def _reduction(self, header: Header) -> int:
        """2, 4 or 8 where the image stays large enough, else 1; libjpeg then computes fewer pixels."""
        if self.shrink_above is None:
            return 1
        fitting = [r for r in (8, 4, 2) if min(header.height, header.width) // r >= self.shrink_above]
        return fitting[0] if fitting else 1

    def keeps(self, header: Header) -> bool:
        """Whether an image comes out as large as it is stored."""
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
        return np.ascontiguousarray(_turn(pixels, header.orientation))

    def _check_end(self, data: bytes) -> None:
        """Refuses a JPEG that ends before its last pixel: libjpeg goes on in grey, with a warning that nobody hears.

        Few images are of this grey in their last corner. Of these, more data are put before the end; pixels that change
        by that were not in the file.
        """
        end = data.rfind(b"\xff\xd9")
        # by Pillow: torchvision lets libjpeg tell the user about the bytes that were put in
        if end >= 0 and (_by_pillow(data) != _by_pillow(data[:end] + MORE + data[end:])).any():
            raise Unreadable("broken JPEG: it ends before all the pixels that its header says")

    def _libjpeg(self, data: bytes) -> Pixels:
        import torch
        from torchvision.io import ImageReadMode, decode_jpeg

        mode = ImageReadMode.GRAY if self.num_channels == 1 else ImageReadMode.RGB
        pixels: Pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=mode).numpy()
        return pixels

    def _pillow(self, data: bytes, header: Header | None, reduction: int = 1) -> Pixels:
        """Transparency is dropped; of an animation the first frame is taken."""
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
            if image.mode in DEEP_MODES:
                grey = to_bytes(np.asarray(image), self.max_value)
                pixels = np.repeat((255 - grey if tags.get(262) == 0 else grey)[None], self.num_channels, axis=0)
            else:
                mode = "L" if self.num_channels == 1 else "RGB"
                array = np.asarray(image if image.mode == mode else image.convert(mode))
                pixels = array.transpose(2, 0, 1) if array.ndim == 3 else array[None]
            turn = header.orientation if header is not None else _orientation(image)
            return np.array(_turn(pixels, turn), order="C")  # its own memory

    def _deep_tiff(self, data: bytes) -> Pixels:
        """Colours of 16 bits, of which Pillow would keep the upper 8."""
        pixels = Decoder(self.max_pixels, 3, self.max_value)._bands(data, at_least=True)
        return pixels if self.num_channels == 3 else _to_grey(pixels).round().astype(np.uint8)

    def _other_tiff(self, data: bytes) -> Pixels:
        """A TIFF file of numbers that Pillow does not know, such as colors of 32 bits; gray or colors only."""
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
        return pixels if bands == self.num_channels else _to_grey(pixels).round().astype(np.uint8)

    def _deep_png(self, data: bytes) -> Pixels:
        """Colours of 16 bits, of which Pillow would keep the upper 8."""
        import torch
        from torchvision.io import ImageReadMode, decode_png

        self._check(int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big"))
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        deep = decode_png(encoded, mode=ImageReadMode.RGB).to(torch.int32).numpy()
        if self.num_channels == 1:
            deep = _to_grey(deep).round().astype(np.int32)
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            return np.array(_turn(to_bytes(deep, self.max_value), _orientation(image)), order="C")

    def _bands(self, data: bytes, at_least: bool = False) -> Pixels:
        """A TIFF file of any number of channels, first or last; `at_least`: more are there and left (transparency)."""
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
            found = file.pages[0].tags.get(ORIENTATION)
        array = array if array.dtype == np.uint8 else to_bytes(array, self.max_value)
        return np.ascontiguousarray(_turn(array, 1 if found is None else int(found.value)))


def to_bytes(values: NDArray[Any], max_value: float | None) -> NDArray[np.uint8]:
    """Numbers of more than 8 bits as bytes: 0 is black, `max_value` white, nothing is stretched in between.

    Without a `max_value`, white is the least of 255, 1023, 4095, 16383 and 65535 (8 to 16 bits) that the largest number
    of the image does not exceed, so that 12 bits in a file of 16 are not nearly black; fractions up to 1 have white 1.
    Numbers that are not finite would be black without a word, or make the rest of the image so: it is refused.
    """
    numbers = values.astype(np.float64)
    finite = np.isfinite(numbers)
    if not finite.all():
        bad = finite.size - int(finite.sum())
        raise Unreadable(f"{bad} of its {finite.size} numbers are NaN or infinite; replace them, for example by 0")
    top = float(numbers.max(initial=0.0))
    if max_value is None:
        fractions = np.issubdtype(values.dtype, np.floating) and top <= 1
        max_value = 1.0 if fractions else next((float(white) for white in DEEP if top <= white), top)
    return np.asarray((numbers * (255.0 / max_value)).clip(0, 255).round().astype(np.uint8))


def _by_pillow(data: bytes) -> NDArray[Any]:
    with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
        return np.asarray(image)


def _check_sums(data: bytes) -> None:
    """Refuses a PNG of which a part that matters is not what was written; Pillow looks at the sums of some only.

    That takes 3 % of the time of decoding. What is not there at all is Pillow's to find out.
    """
    place, view = len(PNG), memoryview(data)
    while place + 12 <= len(data):
        length, kind = int.from_bytes(data[place : place + 4], "big"), data[place + 4 : place + 8]
        end = place + 8 + length
        if end + 4 > len(data):
            return
        needed = kind[0] & 0x20 == 0  # a capital letter, as in IHDR, PLTE, IDAT
        if needed and zlib.crc32(view[place + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            part = f"its part {kind.decode()}" if kind.isalpha() else "one of its parts"
            raise Unreadable(f"broken PNG: the checksum of {part} is wrong")
        if kind == b"IEND":
            return
        place = end + 4


def _check_memory(error: Exception) -> None:
    """PyTorch has no error of its own for this."""
    if "DefaultCPUAllocator" in str(error):
        raise MemoryError(str(error)) from None


def _sentence(error: Exception) -> str:
    """The first line of a reader's message, without the place in its source that torchvision puts before it."""
    first = (str(error).splitlines() or [""])[0]
    return re.sub(r"^.*\.(?:cpp|cc|h):\d+\W*", "", first)[:200]


def _reason(error: Exception) -> str:
    """What a reader says of a file, as a person would."""
    text = _sentence(error)
    if "truncat" in text.lower():
        return "the file is cut off: it ends before its last pixel"
    return f"it cannot be decoded ({text})" if text else "it cannot be decoded"


def tiff_bands(data: bytes) -> int | None:
    """How many numbers each pixel of a TIFF file has, without transparency; None if it is none or broken."""
    if not data.startswith(TIFF + BIG_TIFF):
        return None
    try:
        tags, file = ImageFileDirectory_v2(data[: 16 if data.startswith(BIG_TIFF) else 8]), io.BytesIO(data)
        file.seek(tags.next)
        tags.load(file)
        if not (WIDTH in tags and HEIGHT in tags and any(part in tags for part in PARTS)):
            return None
        return int(tags.get(SAMPLES, 1)) - sum(kind in ALPHA for kind in tags.get(EXTRA_SAMPLES, ()))
    except Exception:  # of many kinds, where it is broken
        return None


def is_deep(image: Image.Image, data: bytes) -> bool:
    """Whether an image has colours of more than 8 bits, which Pillow's mode of it does not say."""
    bits = getattr(image, "tag_v2", {}).get(258, (8,))
    return image.mode not in DEEP_MODES and (max(bits) > 8 or _is_deep_png(data))


def _is_deep_png(data: bytes) -> bool:
    """16 bits of colour, or of grey with transparency; only where the header is the first thing, as it must be."""
    return data.startswith(PNG + b"\0\0\0\rIHDR") and len(data) > 25 and data[24] == 16 and data[25] in (2, 4, 6)


def _to_grey(pixels: NDArray[Any]) -> NDArray[Any]:
    """1×height×width: ITU-R 601, as Pillow turns colours into grey."""
    return np.tensordot(np.array([[0.299, 0.587, 0.114]]), pixels, 1)


def _orientation(image: Image.Image) -> int:
    return int(image.getexif().get(ORIENTATION, 1))


def _turn(pixels: NDArray[Any], orientation: int) -> NDArray[Any]:
    """C×height×width as stored -> upright; the eight orientations of EXIF."""
    if orientation in (5, 6, 7, 8):  # rows are columns
        pixels = pixels.transpose(0, 2, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, :, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[:, ::-1]
    return pixels


def size_of(data: bytes) -> tuple[int, int]:
    """(height, width) from the header alone, as stored."""
    header = read_header(data)
    if header is not None:
        return header.height, header.width
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.height, image.width
    except Exception as error:
        raise Unreadable(type(error).__name__) from None
