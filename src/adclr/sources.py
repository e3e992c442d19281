"""What to read: a folder of images. Knows paths, keys and labels; pixels are `decode`'s."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from adclr.config import UserError
from adclr.draws import Words, key_of

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")


class ImageFolder:
    """Every image below a folder, in the order of its relative paths.

    Hidden files and folders are passed over; a folder reached by two links is read once. The first level of
    sub-folders, where there is one, gives labels; nothing but a probe ever asks for them.
    """

    def __init__(self, root: str | Path, paths: Sequence[str] | None = None) -> None:
        self.root = Path(root)
        self.paths = list(paths) if paths is not None else find_images(self.root)
        self.keys: Words = np.fromiter((key_of(path) for path in self.paths), np.uint64, len(self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> bytes:
        return (self.root / self.paths[index]).read_bytes()

    def label(self, index: int) -> str | None:
        first, slash, _ = self.paths[index].partition("/")
        return first if slash else None

    def fingerprint(self) -> str:
        """A hash of all keys: the same collection, wherever it lies."""
        return blake2b(np.sort(self.keys).tobytes(), digest_size=16).hexdigest()


def find_images(root: Path) -> list[str]:
    """Relative paths, with '/', of all images below `root`, sorted."""
    try:
        if not root.exists():
            raise UserError(f"folder {root} does not exist; check the path")
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; give the folder that holds the images")
    except OSError as error:
        raise UserError(f"folder {root} cannot be read ({error.strerror}); check the path") from None
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    waiting = [""]
    while waiting:
        below = waiting.pop()
        here = root / below
        status = here.stat()
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except PermissionError:
            raise UserError(f"folder {here} may not be read; change its permissions") from None
        for entry in entries:
            path = f"{below}/{entry.name}" if below else entry.name
            if entry.name.startswith("."):
                continue
            try:
                if entry.is_dir():
                    waiting.append(path)
                elif entry.name.lower().endswith(SUFFIXES) and entry.is_file():
                    found.append(path)
            except OSError:
                continue  # a link that leads nowhere, for one to itself
    if not found:
        raise UserError(f"folder {root} holds no image; these count: {' '.join(SUFFIXES)}")
    return sorted(found)
