"""What the header of a JPEG file says, read without decoding it: size, kind, orientation. Bytes are not trusted."""

from __future__ import annotations

import struct
from dataclasses import dataclass

SIGNATURE = b"\xff\xd8\xff"
_ALONE = {0x01, *range(0xD0, 0xD9)}  # markers without a length
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # start of frame; the other three are tables
DECODABLE = {0xC0, 0xC1, 0xC2}  # baseline, extended and progressive Huffman: what libjpeg and nvJPEG decode


@dataclass(frozen=True)
class Header:
    height: int  # as stored, before it is turned upright
    width: int
    components: int  # 1 grey, 3 colour, 4 CMYK
    frame: int  # the marker of the frame
    orientation: int  # of EXIF, 1 to 8; 1 is upright
    luma: bool  # three components are brightness and colours, not red, green and blue

    @property
    def plain(self) -> bool:
        """Grey or three components of 8 bits, coded in the common way: what any decoder can read."""
        return self.frame in DECODABLE and self.components in (1, 3)

    @property
    def baseline(self) -> bool:
        """Colours of 8 bits in one scan, as nearly all cameras write them."""
        return self.frame == 0xC0 and self.components == 3 and self.luma

    def fits(self, data: bytes) -> bool:
        """Whether a file can hold these pixels at all: in the common codes a block of 8×8 takes a bit or more."""
        blocks = -(-self.height // 8) * -(-self.width // 8)
        return not self.plain or blocks <= 8 * len(data)


def read_header(data: bytes) -> Header | None:
    """None if this is not a JPEG file or its header is broken."""
    if not data.startswith(SIGNATURE):
        return None
    place, orientation, luma = 2, 1, True
    while place + 4 <= len(data):
        if data[place] != 0xFF:
            return None
        marker = data[place + 1]
        if marker == 0xFF:  # padding
            place += 1
            continue
        if marker < 0xC0 and marker != 0x01:  # reserved; what decoders make of these differs, so no one is trusted
            return None
        if marker in _ALONE:
            place += 2
            continue
        length = int.from_bytes(data[place + 2 : place + 4], "big")
        start, end = place + 4, place + 2 + length
        if length < 2 or end > len(data):
            return None
        if marker == 0xE1 and orientation == 1:
            orientation = _orientation(data[start:end])
        elif marker == 0xEE and data[start : start + 5] == b"Adobe" and length >= 14:
            luma = data[start + 11] != 0  # its way to say that colours were not transformed
        elif marker in _FRAMES:
            if length < 8:
                return None
            bits, height, width, components = struct.unpack(">BHHB", data[start : start + 6])
            if not height or not width or bits != 8:
                return None
            names = bytes(data[start + 6 + 3 * i] for i in range(components) if start + 6 + 3 * i < end)
            return Header(height, width, components, marker, orientation, luma and names != b"RGB")
        elif marker in (0xD9, 0xDA):  # the end, or pixels before any frame
            return None
        place = end
    return None


def _orientation(block: bytes) -> int:
    """The orientation tag of an EXIF block; 1 where there is none that makes sense."""
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
