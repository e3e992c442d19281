"""Opening a collection by its name: a folder, a .txt list, .tar shards or hf:PATH."""

from __future__ import annotations

import glob
import os
import re
import statistics
from pathlib import Path

import numpy as np

from adclr.config.auto import Choice, choose
from adclr.config.parsing import UserError
from adclr.data.decode import Unreadable, size_of
from adclr.data.huggingface import HuggingFace
from adclr.data.sources import FileList, ImageFolder, Listing, Source, index_folder, load_listing
from adclr.data.tar_shards import TarShards
from adclr.system.machine import gpu_bytes
from adclr.system.threads import ThreadPool, wait_for

LISTS = (".txt", ".lst", ".list")
SAMPLE = 200  # images whose headers are read


def open_source(where: str | Path, index: Path | None = None, allow_damaged: bool = False) -> Source:
    """Return the source that a name stands for.

    `index` is a file that may hold the index of an earlier search; `allow_damaged` takes what can be read of tar shards
    that are cut off, which are refused otherwise.
    """
    text = os.fspath(where)
    if text.startswith("hf:"):
        return HuggingFace(text.removeprefix("hf:"))
    if not os.path.exists(text) and re.search(r"[*?\[{]", text):
        return TarShards(text, expand(text), _load_index(index), allow_damaged)
    if os.path.isfile(text):
        if text.endswith(".tar"):
            return TarShards(text, [text], _load_index(index), allow_damaged)
        if text.endswith(LISTS):
            return FileList(text)
        raise UserError(f"{text} is not a folder, a list ({' '.join(LISTS)}) or a .tar shard; name one of these")
    if os.path.isdir(text):
        shards = sorted(glob.glob(f"{glob.escape(text)}/*.tar"))
        if shards:  # a forgotten archive beside photos is not the collection
            listing = index_folder(Path(text))
            if listing.names:
                return ImageFolder(text, listing)
            return TarShards(text, shards, _load_index(index), allow_damaged)
    known = _load_index(index)
    of_folder = known is not None and next(iter(known.facts)) == os.path.abspath(text)
    return ImageFolder(text, known if of_folder else None)


def _load_index(index: Path | None) -> Listing | None:
    """Return the index in a file if it still describes the collection."""
    listing = None if index is None else load_listing(index)
    return listing if listing is not None and listing.current() else None


def expand(pattern: str) -> list[str]:
    """Return the files of a pattern: shell wildcards, and ranges as in train-{0000..0146}.tar."""
    numbered = re.search(r"\{(\d{1,12})\.\.(\d{1,12})\}", pattern)
    if numbered:
        first, last = numbered[1], numbered[2]
        if not 0 <= int(last) - int(first) <= 1_000_000:
            raise UserError(f"{pattern} names no shard, or more than a million; check its range")
        numbers = (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
        names = [pattern[: numbered.start()] + number + pattern[numbered.end() :] for number in numbers]
        return list(dict.fromkeys(path for name in names for path in expand(name)))
    paths = sorted(glob.glob(pattern)) if re.search(r"[*?\[]", pattern) else [pattern]
    if not paths:
        raise UserError(f"no file is named as {pattern}; check the pattern")
    return paths


def median_side(source: Source) -> int:
    """Return the median of the shorter sides of up to 200 images, spread over the collection."""

    def side(index: int) -> int | None:
        try:
            return min(size_of(source.read(index)))
        except (Unreadable, OSError):
            return None

    chosen = np.linspace(0, len(source) - 1, min(SAMPLE, len(source))).astype(int)
    with ThreadPool(1, "headers") as reader:  # in a thread, so that a disk that hangs is noticed
        lengths = [wait_for(future, reader) for future in [reader.submit(side, int(index)) for index in chosen]]
    sides = [length for length in lengths if length is not None]
    if not sides:
        tried = min(SAMPLE, len(source))
        raise UserError(f"none of the {tried} images of {source.root} that were tried can be read; are they images?")
    return int(statistics.median(sides))


def choose_recipe(source: Source, device: str) -> Choice:
    """Return the automatic choice of a recipe for a collection and a device."""
    return choose(len(source), median_side(source), gpu_bytes(device))


def check_apart(out: Path, source: Source, option: str = "--out") -> None:
    """Refuse a folder in which the images of a collection are searched for, or one below it."""
    if source.holds(out):
        raise UserError(
            f"{out} lies in the collection {source.root}, where what is written would be taken for images; "
            f"choose another {option}"
        )
