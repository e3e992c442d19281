"""Opening a collection by its name: a folder, a .txt list, .tar shards, Parquet or Arrow files, hf:NAME, or a URL."""

from __future__ import annotations

import glob
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from adclr.config.auto import Choice, choose
from adclr.config.parsing import UserError
from adclr.data.decode import Unreadable, size_of
from adclr.data.listing import Listing, load_listing
from adclr.data.listing_builder import load_shared
from adclr.data.sources import SUFFIXES, FileList, ImageFolder, Source, huggingface_cache, index_folder
from adclr.data.sources.huggingface import HuggingFace
from adclr.data.sources.object_stores import StoreFolder, open_list
from adclr.data.sources.tables import SUFFIXES as TABLES
from adclr.data.sources.tables import Tables
from adclr.data.sources.tar_shards import TarShards
from adclr.system import stores
from adclr.system.machine import gpu_bytes
from adclr.system.outputs import read_author
from adclr.system.store_urls import base_name, conceal, is_remote
from adclr.system.threads import ThreadPool, wait_for

LISTS = (".txt", ".lst", ".list")
SAMPLE = 200  # images whose headers are read


def open_source(where: str | Path, index: Path | None = None, allow_damaged: bool = False) -> Source:
    """Return the source that a name stands for.

    `index` is a file that may hold the index of an earlier search; `allow_damaged` takes what can be read of tar shards
    that are cut off, which are refused otherwise.
    """
    text = conceal(os.fspath(where))
    if text.startswith("hf:") and not is_remote(text):
        name = text.removeprefix("hf:")
        if not name:
            raise UserError("hf: names no data set; write hf:NAME, or hf:PATH of a saved one")
        if huggingface_cache.is_name(name):
            return _open_files(text, huggingface_cache.find_files(name), index, allow_damaged)
        return HuggingFace(name)
    if is_remote(text):
        return _open_in_store(text, index, allow_damaged)
    if not os.path.exists(text) and re.search(r"[*?\[{]", text):
        return _open_files(text, expand(text), index, allow_damaged)
    if os.path.isfile(text):
        if text.endswith(LISTS):
            return open_list(text) or FileList(text)
        if text.endswith((".tar", *TABLES)):
            return _open_files(text, [text], index, allow_damaged)
        raise UserError(
            f"{text} is not a folder, a list ({' '.join(LISTS)}), a .tar shard or a table ({' '.join(TABLES)}); "
            "name one of these"
        )
    folder = os.path.abspath(text)
    known = _load_index(index)
    if known is None or next(iter(known.facts)) != folder:
        known = load_shared([folder])
    if known is None and os.path.isdir(text):
        with os.scandir(text) as entries:
            files = _packed_files(os.path.join(text, entry.name) for entry in entries)
        if files:  # a forgotten archive beside photos is not the collection
            listing = index_folder(Path(text))
            if listing.names:
                return ImageFolder(text, listing)
            return _open_files(text, files, index, allow_damaged)
    return ImageFolder(text, known)


def _open_in_store(url: str, index: Path | None, allow_damaged: bool) -> Source:
    """Return the source that a URL stands for."""
    if re.search(r"[*\[{]", url):
        return _open_files(url, expand(url), index, allow_damaged)
    name = base_name(url)
    try:
        if name.endswith(LISTS):
            listed = open_list(url)
            assert listed is not None  # of a URL it is not
            return listed
        if name.endswith((".tar", *TABLES)):
            return _open_files(url, [url], index, allow_damaged)
    except FileNotFoundError:
        raise UserError(f"{url} does not exist; check the URL") from None
    files = stores.list_files(url)
    packed = _packed_files(file.url for file in files if "/" not in file.url[len(url.rstrip("/")) + 1 :])
    if packed and not StoreFolder.holds_images(url, files):
        return _open_files(url, packed, index, allow_damaged)
    if not files:
        raise UserError(f"{url} does not exist, or holds nothing; check the URL")
    return StoreFolder(url, files)


def _packed_files(names: Iterable[str]) -> list[str]:
    """Return the shards among files, or, if there are none, the Parquet files, or the Arrow files; sorted."""
    kinds = (".tar", *TABLES)
    visible = sorted(name for name in names if name.endswith(kinds) and not os.path.basename(name).startswith("."))
    of_kind = ([name for name in visible if name.endswith(kind)] for kind in kinds)
    return next((files for files in of_kind if files), [])


def _open_files(where: str, files: Sequence[str], index: Path | None, allow_damaged: bool) -> Source:
    """Return the source of tar shards, or of tables."""
    if all(base_name(file).endswith(TABLES) for file in files):
        return Tables(where, list(dict.fromkeys(files)))
    return TarShards(where, files, _load_index(index), allow_damaged)


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
    if is_remote(pattern):  # a ? begins a query there
        matches = [file.url for file in stores.match_files(pattern)] if re.search(r"[*\[]", pattern) else [pattern]
    else:
        matches = sorted(glob.glob(pattern)) if re.search(r"[*?\[]", pattern) else [pattern]
    if not matches:
        raise UserError(f"no file is named as {pattern}; check the pattern")
    return matches


def is_folder(where: str) -> bool:
    """Return whether there is a folder of this name, or something below this URL."""
    return stores.exists(where) if is_remote(where) else os.path.isdir(where)


def median_side(source: Source) -> int:
    """Return the median of the shorter sides of up to 200 images, spread over the collection."""

    def side(index: int) -> int | None:
        try:
            return min(size_of(source.read(index)))
        except (Unreadable, OSError):
            return None

    chosen = np.linspace(0, len(source) - 1, min(SAMPLE, len(source))).astype(int)
    source.announce(chosen.tolist())
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


def check_apart(out: Path, source: Source, option: str = "--out", is_file: bool = False) -> None:
    """Refuse a folder in which the images of a collection are searched for, or one below it, or a file there.

    A file that is no image may lie beside a single shard or list, since nothing is searched for there; beside a table
    it would be taken for another one.
    """
    if is_file and os.path.isfile(source.root) and not isinstance(source, Tables):
        return
    if source.holds(out.parent if is_file else out):
        raise UserError(describe_inside(out, source.root, option))


def check_no_images(out: Path, record: Path, overwrite: bool) -> None:
    """Refuse a folder with images that no command wrote, as long as this command has not written its `record` there.

    That is a collection too, though not the one that is read: pictures in it would be taken for images by a later run.
    """
    if overwrite or record.exists() or not out.is_dir():
        return
    with os.scandir(out) as entries:
        visible = (entry for entry in entries if not entry.name.startswith(".") and entry.is_file())
        images = (entry for entry in visible if entry.name.lower().endswith(SUFFIXES))
        other = next((entry.name for entry in images if read_author(Path(entry.path)) is None), None)
    if other is not None:
        raise UserError(
            f"{out} has other images, such as {other}, and a run on them would take pictures that are written there "
            "for more of them; choose another --out, or say --overwrite to write there"
        )


def describe_inside(out: str | Path, root: str | Path, option: str = "--out") -> str:
    """Return the sentence by which an output that lies in a collection is refused."""
    return f"{out} lies in the collection {root}, so its files would be read as images; choose another {option}"
