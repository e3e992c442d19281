"""Decoding of JPEG files on the GPU, a batch at a time, by the hardware decoder of data-center GPUs.

On an H200 nvJPEG decodes 19 000 baseline JPEGs of 500 pixels in a second, 16 CPU threads 6 500; but it decodes only 290
progressive ones. So it gets the baseline ones, and `decode` all others. Its pixels differ from libjpeg's by 1/255 in
the mean where colors are stored at half the resolution, because it interpolates them in another way.

It decodes a file that ends before its last pixel without an error, gray from there on. So an image whose last pixel has
that gray is decoded by the CPU, which finds out whether the file is complete.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from adclr.data.decode import COLUMNS_FLIPPED, MISSING, ROWS_FLIPPED, Decoder, Pixels, Unreadable, turn_upright
from adclr.data.jpeg_header import Header, read_header
from adclr.data.packed import Packed, pack
from adclr.system.devices import decoding_stream

END = b"\xff\xd9"
# A file whose end marker is further from its last byte than this goes to the CPU, which finds out what is wrong.
TRAILING = 64
ROUNDING = 2  # of 255: how far the gray of missing data may be from libjpeg's; a few complete images go to the CPU too
# GPUs with a hardware decoder: A100, H100 / H200, B200. On others nvJPEG would compete with the training.
CAPABLE = ((8, 0), (9, 0), (10, 0))
# Bytes are passed to the decoder as a tensor without a copy, and it only reads them.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


@dataclass(frozen=True)
class Encoded:
    """A file that the GPU is to decode."""

    data: bytes
    header: Header


class GpuDecoder:
    """Decodes and packs batches on its own CUDA stream."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self.decoder, self.device = decoder, device

    @staticmethod
    def suits(device: torch.device) -> bool:
        """Return whether a device has a hardware decoder that works."""
        return device.type == "cuda" and torch.cuda.get_device_capability(device) in CAPABLE and _works(device)

    def take(self, data: bytes) -> Encoded | None:
        """Return a file that is better decoded on the GPU; None for any other, broken ones among them."""
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
        """Return the batch in the device's memory; or None and the positions of files that the GPU cannot decode."""
        with decoding_stream(self.device):  # this thread waits at its end, not the one that trains
            decoded = self._decode([item for item in items if isinstance(item, Encoded)])
            if decoded is None:  # one by one, so that the result of an image depends on that image alone
                singly = [self._decode([item]) if isinstance(item, Encoded) else [] for item in items]
                failed = [position for position, images in enumerate(singly) if images is None]
                if failed:
                    return None, failed
                decoded = [image for images in singly if images for image in images]
            packed = self._pack_in_order(items, decoded)
            doubtful = _gray_at_the_end(packed, items)
            if doubtful:
                positions = [position for position, item in enumerate(items) if isinstance(item, Encoded)]
                items, failed = self._by_cpu(items, doubtful)
                if failed:
                    return None, failed
                certain = [
                    image for position, image in zip(positions, decoded, strict=True) if position not in doubtful
                ]
                packed = self._pack_in_order(items, certain)
        return packed, []

    def _by_cpu(self, items: list[Pixels | Encoded], positions: list[int]) -> tuple[list[Pixels | Encoded], list[int]]:
        """Return the items with some of them decoded by the CPU, and the positions of those that it refuses."""
        items, failed = list(items), []
        for position in positions:
            item = items[position]
            assert isinstance(item, Encoded)
            try:
                items[position] = self.decoder(item.data)
            except Unreadable:  # the caller asks the CPU again and lists the reason
                failed.append(position)
        return items, failed

    def _pack_in_order(self, items: list[Pixels | Encoded], decoded: list[Tensor]) -> Packed:
        """Pack what the GPU decoded and what the CPU decoded, in the order of the items."""
        by_cpu = [item for item in items if not isinstance(item, Encoded)]
        rest = pack(by_cpu, pin=self.device.type == "cuda").to(self.device) if by_cpu else None
        parts, shapes, start, images = [], [], 0, iter(decoded)
        for item in items:
            if isinstance(item, Encoded):
                image = next(images)
                parts.append(image.reshape(-1))
                shapes.append(tuple(image.shape[1:]))
            else:
                assert rest is not None
                parts.append(rest.bytes[start : start + item.size])
                shapes.append(item.shape[1:])
                start += item.size
        lengths = np.array([len(part) for part in parts], np.int64)
        return Packed(torch.cat(parts), np.cumsum(lengths) - lengths, np.array(shapes, np.int64), 3)

    def _decode(self, encoded: list[Encoded]) -> list[Tensor] | None:
        if not encoded:
            return []
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # see `decoding_stream`
        try:
            images = _nvjpeg([item.data for item in encoded], self.device)
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise torch.OutOfMemoryError(str(error)) from None
            return None
        sizes = [(item.header.height, item.header.width) for item in encoded]
        if [tuple(image.shape[1:]) for image in images] != sizes:
            return None
        return [
            turn_upright(image, item.header.orientation, torch) for image, item in zip(images, encoded, strict=True)
        ]


def _gray_at_the_end(packed: Packed, items: Sequence[Pixels | Encoded]) -> list[int]:
    """Return the positions of encoded images whose last pixel, as stored, has the gray of missing data.

    All last pixels are gathered at once: one small copy to the device and one back for a whole batch.
    """
    orientations = [item.header.orientation if isinstance(item, Encoded) else 1 for item in items]
    rows, columns = packed.sizes[:, 0], packed.sizes[:, 1]
    down = np.where(np.isin(orientations, ROWS_FLIPPED), 0, rows - 1)
    across = np.where(np.isin(orientations, COLUMNS_FLIPPED), 0, columns - 1)
    first = packed.offsets + down * columns + across
    indices = first[:, None] + np.arange(packed.num_channels) * (rows * columns)[:, None]
    pixels = packed.bytes[torch.from_numpy(indices).to(packed.bytes.device)].cpu().numpy()
    gray = np.abs(pixels.astype(np.int64) - MISSING).max(axis=1) <= ROUNDING
    return [position for position, item in enumerate(items) if gray[position] and isinstance(item, Encoded)]


def _nvjpeg(data: list[bytes], device: torch.device) -> list[Tensor]:
    from torchvision.io import ImageReadMode, decode_jpeg

    blobs = [torch.frombuffer(item, dtype=torch.uint8) for item in data]
    images: list[Tensor] = decode_jpeg(blobs, mode=ImageReadMode.RGB, device=device)
    return images


@cache
def _works(device: torch.device) -> bool:
    """Return whether this torchvision was built with nvJPEG: it decodes one small image."""
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32)).save(buffer, "JPEG")
    try:
        return _nvjpeg([buffer.getvalue()], device)[0].shape == (3, 32, 32)
    except RuntimeError:
        return False
