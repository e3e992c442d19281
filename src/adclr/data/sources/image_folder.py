"""A folder of images as a source, and the search for its images."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Literal

from adclr.config.parsing import UserError
from adclr.data.sources import SUFFIXES, Source
from adclr.data.sources.listing import NO_EXTENTS, Facts, Listing, fact
from adclr.system.progress import ProgressCount

PROGRESS_EVERY = 1000  # images between two updates of the progress, also within one folder


class ImageFolder(Source):
    """Every image below a folder, in the order of its relative paths.

    Hidden files and folders are skipped; a folder or file reached by two links is read once.
    """

    def __init__(self, root: str | Path, listing: Listing | None = None) -> None:
        root = Path(root)
        listing = listing or index_folder(root)
        if not listing.names and listing.problems:
            link, problem = next(iter(listing.problems.items()))
            raise UserError(f"folder {root} holds no image that is there: {link} is {problem}; restore it")
        if not listing.names:
            raise UserError(f"folder {root} holds no image; these count: {' '.join(SUFFIXES)}")
        super().__init__(root, listing.names, listing)

    def holds(self, folder: str | Path) -> bool:
        """Return whether images are searched for in this folder."""
        assert self.listing is not None
        return is_searched(folder, self.listing.facts)


def is_searched(folder: str | Path, searched: Iterable[str | Path]) -> bool:
    """Return whether a folder, which need not exist yet, is one of these or below one; a hidden folder is not."""
    roots, path = {os.path.realpath(root) for root in searched}, Path(os.path.realpath(folder))
    for parent in (path, *path.parents):
        if str(parent) in roots:
            return True
        if parent.name.startswith("."):
            return False
    return False


def index_folder(root: Path) -> Listing:
    """Index the relative paths, with '/', of all images below `root`, sorted; there may be none."""
    try:
        if not root.exists():
            raise UserError(f"folder {root} does not exist; check the path")
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; give the folder that holds the images")
    except OSError as error:
        raise UserError(f"folder {root} cannot be read ({error.strerror}); check the path") from None
    names: list[str] = []
    links: dict[str, str] = {}  # the first name of each file that links point to
    facts: Facts = {}
    problems: dict[str, str] = {}
    visited: set[tuple[int, int]] = set()
    pending = [""]
    with ProgressCount("indexing", "images") as tally:
        while pending:
            relative = pending.pop()
            folder = root / relative
            status = folder.stat()
            if (status.st_dev, status.st_ino) in visited:
                continue
            visited.add((status.st_dev, status.st_ino))
            facts[os.path.abspath(folder)] = fact(folder, False)  # before it is read, so that no change is missed
            subfolders = []
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        path = f"{relative}/{entry.name}" if relative else entry.name
                        kind = _kind(entry)
                        if kind == "folder":
                            subfolders.append(path)
                        elif kind == "link":
                            file = os.path.realpath(entry.path)
                            links[file] = min(path, links.get(file, path))
                        elif kind == "file":
                            names.append(path)
                        elif kind == "dangling":
                            link = os.path.abspath(entry.path)
                            problems[link] = f"a link to {os.readlink(link)}, which is not there"
                        if len(names) - tally.count >= PROGRESS_EVERY:
                            tally.add(len(names) - tally.count)
            except PermissionError:
                raise UserError(f"folder {folder} may not be read; change its permissions") from None
            pending += sorted(subfolders)  # of two links, the same one is followed wherever the collection is stored
    if links:
        files = {os.path.join(_real(root, os.path.dirname(path)), os.path.basename(path)) for path in names}
        names += [path for file, path in links.items() if file not in files]
    return Listing(sorted(names), facts, NO_EXTENTS, [], problems)


def _kind(entry: os.DirEntry[str]) -> Literal["folder", "file", "link", "dangling"] | None:
    """Return what an entry of a folder is to a search for images; None: it is skipped."""
    if entry.name.startswith("."):
        return None
    try:
        if entry.is_dir():
            return "folder"
        if entry.name.lower().endswith(SUFFIXES) and entry.is_file():
            return "link" if entry.is_symlink() else "file"
    except OSError:  # a link to itself, or into a folder that may not be read
        pass
    return "dangling" if entry.is_symlink() and not os.path.exists(entry.path) else None


@lru_cache(maxsize=2**16)
@lru_cache(maxsize=2**16)
def _real(root: Path, folder: str) -> str:
    return os.path.realpath(root / folder)
