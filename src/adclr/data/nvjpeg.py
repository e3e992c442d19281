"""JPEG files decoded on the GPU, a batch at a time, by the decoder that data-centre cards have beside their cores.

On an H200 nvJPEG makes 19 000 images/s of baseline JPEGs of 500 pixels where 16 CPU threads make 6 500, but only 290 of
progressive ones; so it gets the baseline ones and all others stay with `decode`. Its pixels differ from libjpeg's where
colours are stored at half the resolution, by 1/255 in the mean (it interpolates them otherwise).

Of a file that ends before its last pixel it makes a picture that is gray from there on, without an error. So an image
whose last pixel is of that gray is decoded by the CPU, which finds out whether the file is whole.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from adclr.data.decode import MISSING, Decoder, Pixels, Unreadable
from adclr.data.jpeg import Header, read_header
from adclr.data.packed import Packed, pack
from adclr.system.devices import stream

END = b"\xff\xd9"
# A file whose end lies further from its last byte than this is given to the CPU, which says what is wrong with it.
TRAILING = 64
ROUNDING = 2  # of 255: how far the gray of missing data may be from libjpeg's; a few whole images more go to the CPU
# Orientations of EXIF in which an image is turned upright by reversing its columns, its rows, or both.
COLUMNS_FLIPPED, ROWS_FLIPPED = (2, 3, 6, 7), (3, 4, 7, 8)
# With the decoder beside the cores: A100, H100 / H200, B200. Elsewhere nvJPEG would take the cores from the training.
CAPABLE = ((8, 0), (9, 0), (10, 0))
# Bytes are given to the decoder as a tensor without a copy, and it only reads them.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


@dataclass(frozen=True)
class Encoded:
    """A file that the GPU is to decode."""

    data: bytes
    header: Header


class GpuDecoder:
    """`pack` does for a batch what `decode` and `augment.pack` do, on a CUDA stream of its own."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self.decoder, self.device = decoder, device
        self.stream = stream("decoding", device) if device.type == "cuda" else None

    @staticmethod
    def suits(device: torch.device) -> bool:
        return device.type == "cuda" and torch.cuda.get_device_capability(device) in CAPABLE and _works(device)

    def take(self, data: bytes) -> Encoded | None:
        """A file that is better decoded here; None for any other, broken ones among them."""
        header = read_header(data)
        if header is None or not header.baseline or END not in data[-TRAILING:] or self.decoder.num_channels != 3:
            return None
        if (
            not header.fits(data)
            or header.height * header.width > self.decoder.max_pixels
            or not self.decoder.keeps(header)
        ):
            return None
        return Encoded(data, header)

    def pack(self, items: list[Pixels | Encoded]) -> tuple[Packed | None, list[int]]:
        """The batch in the device's memory when this returns; or the places of those that the GPU cannot decode."""
        with self._on_stream():
            found = self._decode([item for item in items if isinstance(item, Encoded)])
            if found is None:  # one by one, so that what an image becomes hangs on that image alone
                singly = [self._decode([item]) if isinstance(item, Encoded) else [] for item in items]
                failed = [place for place, one in enumerate(singly) if one is None]
                if failed:
                    return None, failed
                found = [image for one in singly if one for image in one]
            packed = self._together(items, found)
            doubtful = gray_at_the_end(packed, items)
            if doubtful:
                places = [place for place, item in enumerate(items) if isinstance(item, Encoded)]
                items, failed = self._by_cpu(items, doubtful)
                if failed:
                    return None, failed
                certain = [image for place, image in zip(places, found, strict=True) if place not in doubtful]
                packed = self._together(items, certain)
            if self.stream:
                self.stream.synchronize()  # this thread waits, not the one that trains
        return packed, []

    def _by_cpu(self, items: list[Pixels | Encoded], places: list[int]) -> tuple[list[Pixels | Encoded], list[int]]:
        """The items with some of them decoded by the CPU, and the places of those that it refuses."""
        items, failed = list(items), []
        for place in places:
            item = items[place]
            assert isinstance(item, Encoded)
            try:
                items[place] = self.decoder(item.data)
            except Unreadable:  # whoever asks for the batch asks the CPU again and lists the reason
                failed.append(place)
        return items, failed

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def _together(self, items: list[Pixels | Encoded], found: list[Tensor]) -> Packed:
        """What the GPU decoded, in order, and what the CPU did, in their places."""
        there = [item for item in items if not isinstance(item, Encoded)]
        rest = pack(there, pin=self.stream is not None).to(self.device) if there else None
        parts, shapes, at, decoded = [], [], 0, iter(found)
        for item in items:
            if isinstance(item, Encoded):
                image = next(decoded)
                parts.append(image.reshape(-1))
                shapes.append(tuple(image.shape[1:]))
            else:
                assert rest is not None
                parts.append(rest.bytes[at : at + item.size])
                shapes.append(item.shape[1:])
                at += item.size
        lengths = np.array([len(part) for part in parts], np.int64)
        return Packed(torch.cat(parts), np.cumsum(lengths) - lengths, np.array(shapes, np.int64), 3)

    def _decode(self, encoded: list[Encoded]) -> list[Tensor] | None:
        if not encoded:
            return []
        try:
            images = _nvjpeg([item.data for item in encoded], self.device)
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise torch.OutOfMemoryError(str(error)) from None
            return None
        sizes = [(item.header.height, item.header.width) for item in encoded]
        if [tuple(image.shape[1:]) for image in images] != sizes:
            return None
        return [_turn(image, item.header.orientation) for image, item in zip(images, encoded, strict=True)]


def gray_at_the_end(packed: Packed, items: Sequence[Pixels | Encoded]) -> list[int]:
    """The places of encoded images whose last pixel, as stored, is of the gray that stands for missing data.

    All last pixels are gathered at once: one small copy to the device and one back for a whole batch.
    """
    turns = [item.header.orientation if isinstance(item, Encoded) else 1 for item in items]
    rows, columns = packed.sizes[:, 0], packed.sizes[:, 1]
    down = np.where(np.isin(turns, ROWS_FLIPPED), 0, rows - 1)
    across = np.where(np.isin(turns, COLUMNS_FLIPPED), 0, columns - 1)
    first = packed.offsets + down * columns + across
    indices = first[:, None] + np.arange(packed.num_channels) * (rows * columns)[:, None]
    pixels = packed.bytes[torch.from_numpy(indices).to(packed.bytes.device)].cpu().numpy()
    gray = np.abs(pixels.astype(np.int64) - MISSING).max(axis=1) <= ROUNDING
    return [place for place, item in enumerate(items) if gray[place] and isinstance(item, Encoded)]


def _nvjpeg(data: list[bytes], device: torch.device) -> list[Tensor]:
    from torchvision.io import ImageReadMode, decode_jpeg

    blobs = [torch.frombuffer(item, dtype=torch.uint8) for item in data]
    images: list[Tensor] = decode_jpeg(blobs, mode=ImageReadMode.RGB, device=device)
    return images


@cache
def _works(device: torch.device) -> bool:
    """Whether this torchvision was built with nvJPEG: it decodes one small image."""
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32)).save(buffer, "JPEG")
    try:
        return _nvjpeg([buffer.getvalue()], device)[0].shape == (3, 32, 32)
    except RuntimeError:
        return False


def _turn(image: Tensor, orientation: int) -> Tensor:
    """As `decode` turns an image upright."""
    if orientation in (5, 6, 7, 8):
        image = image.transpose(1, 2)
    if orientation in COLUMNS_FLIPPED:
        image = image.flip(2)
    if orientation in ROWS_FLIPPED:
        image = image.flip(1)
    return image
