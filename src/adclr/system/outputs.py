"""Who wrote a file: the rule by which no command replaces a file that it did not write.

Every file that a command writes for people says so in itself. The words "written by adclr COMMAND" stand within its
first or last 16 KiB: in a key of a JSON object, a meta tag of a page, a line of text, or a text chunk of a PNG. Such a
file is the command's own, wherever it is moved, and the same command replaces it. Every other file is somebody else's:
the command refuses to replace it before it does any work, unless it is told `--overwrite`.

- Files in the formats of other programs have no room for the words; the JSON file beside them lists them with their
  SHA-256 (`adclr export`), or says what they were made of (`adclr embed`).
- Version 0.1 wrote no words. Its JSON files and pages are known by what they hold, and its pictures and texts by the
  JSON file of version 0.1 that lies beside them.
- A folder in which images are searched for is refused as output, `--overwrite` or not: the next run would take
  pictures that are written there for images of the collection.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from adclr.config.sections import UserError

WORDS = re.compile(rb"written[ _]by\W{1,5}adclr (\w+)")
WINDOW = 2**14  # bytes at either end of a file that are searched for the words
LARGEST = 2**26  # bytes of a JSON file of version 0.1 that is read to know it
REMEDY = "choose another --out, or say --overwrite to replace it"
# Keys of the JSON files of version 0.1, beside "provenance"
OLD_JSON = {
    "evaluate": ("scores", "settings"),
    "doctor": ("troubles", "advice"),
    "plan": ("basis", "memory"),
    "visualize": ("weights", "images"),
}
# What pages hold that have no words of their own: reports of version 0.1, and studies, whose pages name their command
OLD_TEXT = {"report": " · adclr</title>".encode(), "study": b"Command: `adclr study "}


def words(command: str) -> str:
    """Returns what a text, a page or a picture that a command writes has to hold."""
    return f"written by adclr {command}"


def signature(command: str) -> dict[str, str]:
    """Returns what a JSON object that a command writes has to hold, best as the last of its keys."""
    return {"written_by": f"adclr {command}"}


def png(image: Image.Image, command: str) -> bytes:
    """Returns a picture as a PNG file that says who wrote it."""
    info, buffer = PngInfo(), io.BytesIO()
    info.add_text("Software", words(command))
    image.save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()


def author(path: Path) -> str | None:
    """Returns the command that wrote a file, by its words; None if there are none."""
    match = WORDS.search(_ends(path))
    return None if match is None else match[1].decode()


def check(
    command: str, files: Iterable[Path], overwrite: bool = False, record: Path | None = None, remedy: str = REMEDY
) -> None:
    """Refuses if one of the files is there and is not the command's own.

    `record` is the file of these that version 0.1 is known by; it vouches for the others.
    """
    old: bool | None = None
    for path in files:
        if path.is_dir():
            raise UserError(f"{path} is a folder; give the name of a file")
        if overwrite or not os.path.lexists(path) or author(path) == command:
            continue
        if old is None:
            old = _is_old(record if record is not None else path, command)
        if not old:
            raise UserError(f"{path} was not written by adclr {command}; {remedy}")


def _ends(path: Path) -> bytes:
    """The first and the last bytes of a file; none of what cannot be read."""
    try:
        with open(path, "rb") as file:
            head = file.read(WINDOW)
            file.seek(max(len(head), os.fstat(file.fileno()).st_size - WINDOW))
            return head + file.read(WINDOW)
    except OSError:
        return b""


def _is_old(path: Path, command: str) -> bool:
    """Whether a file is one of version 0.1, or a page of a study."""
    if command in OLD_TEXT:
        return OLD_TEXT[command] in _ends(path)
    try:
        value = json.loads(path.read_bytes()) if os.path.getsize(path) <= LARGEST else None
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(value, dict) or command not in OLD_JSON or not set(OLD_JSON[command]) <= set(value):
        return False
    provenance = value.get("provenance")
    return isinstance(provenance, dict) and "adclr" in provenance and "written_by" not in provenance
