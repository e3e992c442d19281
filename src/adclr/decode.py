"""Bytes -> uint8 image. Only listed formats are opened, and no picture larger than a set number of pixels."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
ORIENTATION = 0x0112  # the tag of EXIF
Pixels = NDArray[np.uint8]  # 3×height×width

# Our own limit is checked before decoding; Pillow's would be the same for every caller of the process.
Image.MAX_IMAGE_PIXELS = None


class Unreadable(Exception):
    """An image that cannot be used, with the reason."""


def decode_image(data: bytes, max_pixels: int) -> Image.Image:
    """An upright RGB image. 16-bit grey keeps its upper 8 bits; transparency is dropped; of a GIF the first frame."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise Unreadable(f"{width}x{height} pixels are more than data.max_pixels={max_pixels}")
            image.load()
            upright: Image.Image = image
            if image.getexif().get(ORIENTATION, 1) != 1:  # asked first, since exif_transpose always copies
                upright = ImageOps.exif_transpose(image)
            if upright.mode in ("I", "F") or upright.mode.startswith("I;16"):
                grey = np.asarray(upright).astype(np.float64) / 257.0
                upright = Image.fromarray(grey.clip(0, 255).round().astype(np.uint8))
            return upright if upright.mode == "RGB" else upright.convert("RGB")
    except Unreadable:
        raise
    except UnidentifiedImageError:
        raise Unreadable(f"it is not an image of a known format ({', '.join(FORMATS)})") from None
    # Pillow's readers raise far more kinds of error on broken files than they document (SyntaxError, IndexError, ...)
    except Exception as error:
        text = str(error).splitlines()
        raise Unreadable(f"{type(error).__name__}: {text[0][:200] if text else ''}") from None


def decode(data: bytes, max_pixels: int) -> Pixels:
    """The pixels of an image, 3×height×width."""
    return np.ascontiguousarray(np.asarray(decode_image(data, max_pixels)).transpose(2, 0, 1))


def size_of(data: bytes) -> tuple[int, int]:
    """(height, width) from the header alone."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.height, image.width
    except Exception as error:
        raise Unreadable(type(error).__name__) from None
