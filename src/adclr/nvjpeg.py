"""JPEG files decoded on the GPU, a batch at a time, by the decoder that data-centre cards have beside their cores.

On an H200 nvJPEG makes 19 000 images/s of baseline JPEGs of 500 pixels where 16 CPU threads make 6 500, but only 290 of
progressive ones; so it gets the baseline ones and all others stay with `decode`. Its pixels differ from libjpeg's where
colours are stored at half the resolution, by 1/255 in the mean (it interpolates them otherwise).
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adclr.augment import Packed, pack
from adclr.decode import Decoder, Pixels
from adclr.jpeg import Header, read_header

END = b"\xff\xd9"
# A file whose end lies further from its last byte than this is given to the CPU, which says what is wrong with it.
TRAILING = 64
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
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @staticmethod
    def suits(device: torch.device) -> bool:
        return device.type == "cuda" and torch.cuda.get_device_capability(device) in CAPABLE

    def take(self, data: bytes) -> Encoded | None:
        """A file that is better decoded here; None for any other, broken ones among them."""
        header = read_header(data)
        if header is None or not header.baseline or END not in data[-TRAILING:] or self.decoder.num_channels != 3:
            return None
        if header.height * header.width > self.decoder.max_pixels or not self.decoder.keeps(header):
            return None
        return Encoded(data, header)

    def pack(self, items: list[Pixels | Encoded]) -> Packed | None:
        """The batch in the device's memory when this returns; None if the GPU cannot decode one of these."""
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            found = self._decode([item for item in items if isinstance(item, Encoded)])
            if found is None:
                return None
            there = [item for item in items if not isinstance(item, Encoded)]
            rest = pack(there, pin=self.stream is not None).to(self.device) if there else None
            parts, shapes = [], []
            at = 0
            decoded = iter(found)
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
            flat = torch.cat(parts)
            if self.stream:
                self.stream.synchronize()  # this thread waits, not the one that trains
        lengths = np.array([len(part) for part in parts], np.int64)
        return Packed(flat, np.cumsum(lengths) - lengths, np.array(shapes, np.int64), 3)

    def _decode(self, encoded: list[Encoded]) -> list[Tensor] | None:
        from torchvision.io import ImageReadMode, decode_jpeg

        if not encoded:
            return []
        blobs = [torch.frombuffer(item.data, dtype=torch.uint8) for item in encoded]
        try:
            images: list[Tensor] = decode_jpeg(blobs, mode=ImageReadMode.RGB, device=self.device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return None
        sizes = [(item.header.height, item.header.width) for item in encoded]
        if [tuple(image.shape[1:]) for image in images] != sizes:
            return None
        return [_turn(image, item.header.orientation) for image, item in zip(images, encoded, strict=True)]


def _turn(image: Tensor, orientation: int) -> Tensor:
    """As `decode` turns an image upright."""
    if orientation in (5, 6, 7, 8):
        image = image.transpose(1, 2)
    if orientation in (2, 3, 6, 7):
        image = image.flip(2)
    if orientation in (3, 4, 7, 8):
        image = image.flip(1)
    return image
