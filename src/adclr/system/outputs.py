"""The author of a file: no command replaces a file that it did not write.

Every file that a command writes for people contains the words "written by adclr COMMAND" in its first or last 16 KiB:
in a key of a JSON object, a meta tag of a page, a line of text, or a text chunk of a PNG. The same command may replace
such a file, wherever it was moved. It refuses to replace any other file, before it does any work, unless `--overwrite`
is given.

- Files in the formats of other programs cannot contain the words; the JSON file beside them lists them with their
  SHA-256 (`adclr export`), or says what they were made from (`adclr embed`).
- Version 0.1 did not write the words. Its JSON files and pages are recognized by their content, and its pictures and
  texts by the JSON file of version 0.1 beside them.
- A folder that is searched for images is refused as output, with or without `--overwrite`: the next run would take
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

from adclr.config.parsing import UserError

AUTHOR = re.compile(rb"written[ _]by\W{1,5}adclr (\w+)")
SEARCHED_BYTES = 2**14  # at either end of a file
MAX_OLD_JSON = 2**26  # bytes of a JSON file that is read to see whether it is of version 0.1
REMEDY = "choose another --out, or add --overwrite to replace it"
# Keys of the JSON files of version 0.1, beside "provenance"
OLD_JSON = {
    "evaluate": ("scores", "settings"),
    "doctor": ("troubles", "advice"),
    "plan": ("basis", "memory"),
    "visualize": ("weights", "images"),
}
# Content of pages without the words: reports of version 0.1, and studies, whose pages name their command
OLD_TEXT = {"report": " · adclr</title>".encode(), "study": b"Command: `adclr study "}


def author_words(command: str) -> str:
    """Return the words that a text, a page or a picture of a command has to contain."""
    return f"written by adclr {command}"


def signature(command: str) -> dict[str, str]:
    """Return the key that a JSON object of a command has to contain, best as the last one."""
    return {"written_by": f"adclr {command}"}


def encode_png(image: Image.Image, command: str) -> bytes:
    """Return a picture as a PNG file that names the command."""
    info, buffer = PngInfo(), io.BytesIO()
    info.add_text("Software", author_words(command))
    image.save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()


def read_author(path: Path) -> str | None:
    """Return the command that a file names as its author; None if it names none."""
    match = AUTHOR.search(_ends(path))
    return None if match is None else match[1].decode()


def check_overwrite(
    command: str, files: Iterable[Path], overwrite: bool = False, record: Path | None = None, remedy: str = REMEDY
) -> None:
    """Refuse if one of the files exists and was not written by the command.

    `record` is the file by which files of version 0.1 are recognized, all of these by the one.
    """
    old: bool | None = None
    for path in files:
        if path.is_dir():
            raise UserError(f"{path} is a folder; give the name of a file")
        if overwrite or not os.path.lexists(path) or read_author(path) == command:
            continue
        if old is None:
            old = _is_old(record if record is not None else path, command)
        if not old:
            raise UserError(f"{path} was not written by adclr {command}; {remedy}")


def is_searched(folder: str | Path, searched: Iterable[str | Path]) -> bool:
    """Return whether a folder, which need not exist yet, is one of these or below one; a hidden folder is not.

    Folders are compared by inode, since a file system may take names of other case for the same.
    """
    roots, path = {_identify(root) for root in searched}, Path(os.path.realpath(folder))
    for parent in (path, *path.parents):
        if _identify(parent) in roots:
            return True
        if parent.name.startswith("."):
            return False
    return False


def _identify(path: str | Path) -> tuple[int, int] | str:
    """Return the device and the inode of a folder; the real path of one that does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return os.path.realpath(path)
    return status.st_dev, status.st_ino


def _ends(path: Path) -> bytes:
    """Return the first and the last bytes of a file; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            head = file.read(SEARCHED_BYTES)
            file.seek(max(len(head), os.fstat(file.fileno()).st_size - SEARCHED_BYTES))
            return head + file.read(SEARCHED_BYTES)
    except OSError:
        return b""


def _is_old(path: Path, command: str) -> bool:
    """Return whether a file is one of version 0.1, or a page of a study."""
    if command in OLD_TEXT:
        return OLD_TEXT[command] in _ends(path)
    try:
        value = json.loads(path.read_bytes()) if os.path.getsize(path) <= MAX_OLD_JSON else None
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(value, dict) or command not in OLD_JSON or not set(OLD_JSON[command]) <= set(value):
        return False
    provenance = value.get("provenance")
    return isinstance(provenance, dict) and "adclr" in provenance and "written_by" not in provenance
