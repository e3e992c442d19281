"""The header of a JPEG file, read without decoding it: size, coding, orientation. The bytes are not trusted."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SIGNATURE = b"\xff\xd8\xff"
_ALONE = {0x01, *range(0xD0, 0xD9)}  # markers without a length
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # start of frame; the other three are tables
_SCAN = 0xDA
DECODABLE = {0xC0, 0xC1, 0xC2}  # baseline, extended and progressive Huffman: what libjpeg and nvJPEG decode


@dataclass(frozen=True)
class Header:
    """What the header of a JPEG file says."""

    height: int  # as stored, before it is turned upright
    width: int
    components: int  # 1 gray, 3 color, 4 CMYK
    frame: int  # the marker of the frame
    orientation: int  # of EXIF, 1 to 8; 1 is upright
    luma: bool  # three components are brightness and color differences, not red, green and blue
    scan: int  # where the pixels begin; 0 if there are none
    scanned: int  # number of components in the first scan

    @property
    def plain(self) -> bool:
        """Return whether it is gray or three components of 8 bits, Huffman coded: what any decoder can read."""
        return self.frame in DECODABLE and self.components in (1, 3)

    @property
    def baseline(self) -> bool:
        """Return whether it is color of 8 bits in one scan, as nearly all cameras write."""
        return self.frame == 0xC0 and self.components == self.scanned == 3 and self.luma

    def fits(self, data: bytes) -> bool:
        """Return whether a file can contain so many pixels: a Huffman coded block of 8×8 takes at least one bit."""
        blocks = -(-self.height // 8) * -(-self.width // 8)
        return not self.plain or blocks <= 8 * (len(data) - self.scan)


def read_header(data: bytes) -> Header | None:
    """Return the header; None if this is not a JPEG file or its header is broken."""
    orientation, luma = 1, True
    segments = _segments(data)
    for marker, start, end in segments:
        if marker == 0xE1 and orientation == 1:
            orientation = _orientation(data[start:end])
        elif marker == 0xEE and data[start : start + 5] == b"Adobe" and end - start >= 12:
            luma = data[start + 11] != 0  # then colors were not transformed
        elif marker in _FRAMES:
            if end - start < 6:
                return None
            bits, height, width, components = struct.unpack(">BHHB", data[start : start + 6])
            if not height or not width or bits != 8:
                return None
            names = bytes(data[start + 6 + 3 * i] for i in range(components) if start + 6 + 3 * i < end)
            scan, scanned = _scan(data, segments)
            return Header(height, width, components, marker, orientation, luma and names != b"RGB", scan, scanned)
        elif marker == _SCAN:  # pixels before any frame
            return None
    return None


def _scan(data: bytes, segments: Iterator[tuple[int, int, int]]) -> tuple[int, int]:
    """Return where the first scan after the frame begins, and its number of components."""
    for marker, start, end in segments:
        if marker == _SCAN:
            return end, data[start] if start < end else 0
    return 0, 0


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the marker, start and end of each segment, as long as they are valid."""
    position = 2 if data.startswith(SIGNATURE) else len(data)
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # padding
            position += 1
            continue
        if marker in _ALONE:
            position += 2
            continue
        # reserved (decoders treat these differently), or the end of the image
        if marker < 0xC0 or marker == 0xD9:
            return
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if not position + 4 <= end <= len(data):
            return
        yield marker, position + 4, end
        position = end


def _orientation(block: bytes) -> int:
    """Return the orientation in an EXIF block; 1 where there is none that is valid."""
    if not block.startswith(b"Exif\0\0"):
        return 1
    tiff = block[6:]
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None or len(tiff) < 8:
        return 1
    try:
        (first,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, first)
        for entry in range(min(count, 512)):
            tag, kind, number = struct.unpack_from(order + "HHI", tiff, first + 2 + 12 * entry)
            if tag == 0x0112 and kind in (3, 4) and number == 1:
                (value,) = struct.unpack_from(order + ("H" if kind == 3 else "I"), tiff, first + 10 + 12 * entry)
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 1
