"""What is said of files that are cut off."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from adclr.data.decode import Decoder, Unreadable

PHOTO = Image.fromarray((np.arange(20 * 30 * 3) % 251).reshape(20, 30, 3).astype(np.uint8))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def tiff(pixels: np.ndarray, **options: object) -> bytes:
    import tifffile

    buffer = io.BytesIO()
    tifffile.imwrite(buffer, pixels, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "GIF", "WEBP"])
def test_a_file_that_is_cut_off_is_said_to_be_so(kind: str) -> None:
    data = encoded(PHOTO.resize((300, 200)), kind)
    with pytest.raises(Unreadable) as error:
        Decoder()(data[: len(data) // 2] if kind != "TIFF" else data[:-5000])
    assert str(error.value) == "the file is cut off: it ends before its last pixel"


@pytest.mark.parametrize(("kind", "length"), [("JPEG", 20), ("PNG", 12), ("GIF", 200)])
def test_a_file_without_its_header_is_not_said_to_be_of_an_unknown_format(kind: str, length: int) -> None:
    with pytest.raises(Unreadable, match=f"^broken {kind}: it is cut off, or its header is damaged$"):
        Decoder()(encoded(PHOTO, kind)[:length])


def test_a_cut_off_file_of_bands_is_said_to_be_so() -> None:
    data = tiff(np.ones((64, 64, 5), np.float32), photometric="minisblack", planarconfig="contig")
    with pytest.raises(Unreadable, match="the file is cut off"):
        Decoder(num_channels=5)(data[: len(data) // 2])
    strips = encoded(PHOTO, "TIFF", compression="tiff_lzw")  # with its header at the end
    for num_channels in (3, 5):
        with pytest.raises(Unreadable, match="broken TIFF: it is cut off"):
            Decoder(num_channels=num_channels)(strips[: len(strips) // 2])


def test_libraries_print_nothing_about_damaged_files(tmp_path: Path) -> None:
    for name, options in (("a.tif", {}), ("b.tif", {"compression": "tiff_lzw"})):
        data = encoded(PHOTO, "TIFF", **options)
        (tmp_path / name).write_bytes(data[: len(data) // 2])
    program = (
        "import sys, pathlib\nfrom adclr.data.decode import Decoder, Unreadable\n"
        "for file in sys.argv[1:]:\n  for n in (3, 5):\n"
        "    try: Decoder(num_channels=n)(pathlib.Path(file).read_bytes())\n    except Unreadable as e: print(e)\n"
    )
    files = map(str, sorted(tmp_path.iterdir()))
    done = subprocess.run([sys.executable, "-c", program, *files], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 4
    assert not done.stderr
