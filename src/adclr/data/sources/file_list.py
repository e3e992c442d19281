"""A text file that names images, as a source."""

from __future__ import annotations

import os
from pathlib import Path

from adclr.config.parsing import UserError
from adclr.data.sources import Source
from adclr.system.stores.urls import is_remote


class FileList(Source):
    """A text file with a path on each line, relative to the file's folder or absolute, and a label behind a tab."""

    def __init__(self, file: str | Path) -> None:
        self.labels = parse_list(file, read_list(file))
        self.folder = Path(file).parent
        super().__init__(Path(file), list(self.labels))

    def file(self, index: int) -> str:
        """Return the path of an item."""
        return os.path.join(self.folder, self.paths[index])

    def label(self, index: int) -> str | None:
        """Return the text behind the tab; else the first folder of a relative path, the last of an absolute one."""
        path = self.paths[index]
        return self.labels[path] or label_of(path)


def read_list(file: str | Path) -> bytes:
    """Return the content of a list of images on this machine."""
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UserError(f"list {file} cannot be read ({error.strerror}); check the path") from None


def parse_list(file: str | Path, content: bytes) -> dict[str, str]:
    """Return the label of each path of a list, in order; empty where there is none."""
    text = content.decode("utf-8-sig", errors="surrogateescape")
    if "\0" in text:
        raise UserError(f"list {file} is not text in UTF-8; write it as such")
    rows = [line.rstrip("\r").partition("\t") for line in text.split("\n") if line.strip()]
    labels = {path.strip(): label.strip() for path, _, label in rows}
    if not labels:
        raise UserError(f"list {file} names no image; write one path on each line")
    return labels


def label_of(path: str) -> str | None:
    """Return the first folder of a relative path, the last of an absolute one or a URL; None if there is none."""
    if os.path.isabs(path) or is_remote(path):
        return os.path.basename(os.path.dirname(path)) or None
    first, slash, _ = path.removeprefix("./").partition("/")
    return first if slash else None
