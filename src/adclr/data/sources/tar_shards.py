"""Tar shards: images are read through an index of their positions, in any order; nothing is unpacked to disk.

Shards are files or objects of a store. Labels are beside the images, as WebDataset has them: the text of NAME.cls, or
the label in NAME.json. An image's key is a hash of its name in the shard, as if the shards were unpacked into one
folder; only where two shards have a member of the same name the shard is part of it.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from adclr.config.parsing import UserError
from adclr.data.listing import Facts, Listing, fact, member_name, shard_titles
from adclr.data.listing_builder import ListingBuilder, Storage, build_listing, encode
from adclr.data.sources import SUFFIXES, Source
from adclr.data.sources.store_reader import BLOCK, NUM_AHEAD, StoredObject, StoreReader
from adclr.system import stores
from adclr.system.outputs import is_searched
from adclr.system.progress import ProgressCount
from adclr.system.store_urls import is_remote
from adclr.system.stores import StoreFile
from adclr.system.threads import ThreadPool

LONGEST_LABEL = 256  # bytes of a .cls file
LONGEST_JSON = 2**16  # bytes of a .json file
LABELS = ("label", "cls", "class", "class_name", "category")  # keys of a .json file, the first that is there counts
CHUNK = 2**16  # bytes that are read at once behind the end of an archive, of which there are usually below 10240
SHARDS_AT_ONCE = 16  # of a store that are indexed at the same time
Opener = Callable[[str], BinaryIO]


class TarShards(Source):
    """The images of uncompressed tar files, named SHARD/MEMBER, in the order of shards and members.

    A label is the text of the .cls file beside an image (as WebDataset has it), else the first folder of its name.
    """

    def __init__(
        self, root: str | Path, shards: Sequence[str], listing: Listing | None = None, allow_damaged: bool = False
    ) -> None:
        shards = list(dict.fromkeys(str(shard) for shard in shards))  # patterns may name one twice
        known = listing is not None and list(listing.facts) == shards
        facts = listing.facts if listing is not None and known else _facts(shards)
        self.files: dict[str, StoreFile] = {}  # of the shards in a store
        self.reader: StoreReader | None = None
        if is_remote(shards[0]):
            self.files = {shard: StoreFile(shard, facts[shard][4], facts[shard][1]) for shard in shards}
            self.reader = StoreReader(sum(file.size for file in self.files.values()))
            self.num_ahead = NUM_AHEAD
        if listing is None or not known:
            listing = index_shards(shards, facts, self._open)
        if listing.problems and not allow_damaged:
            raise UserError(_refusal(listing))
        super().__init__(str(root) if self.files else Path(root), listing.names, listing)
        self.shards, self.places, self.labels = list(listing.facts), listing.places, listing.labels

    def _open(self, shard: str) -> BinaryIO:
        """Return a shard as a file."""
        if self.reader is None:
            return open(shard, "rb")
        return cast(BinaryIO, io.BufferedReader(StoredObject(self.reader.streaming(), self.files[shard]), BLOCK))

    def file(self, index: int) -> str:
        """Return the shard of an item."""
        return self.shards[int(self.places[index, 0])]

    def read(self, index: int) -> bytes:
        """Return the bytes of a member."""
        _, offset, length = (int(number) for number in self.places[index])
        if self.reader is not None:
            return self.reader.read(self.files[self.file(index)], offset, length)
        with open(self.file(index), "rb") as file:  # 6 microseconds, measured; held open, thousands would be too many
            file.seek(offset)
            data = file.read(length)
        if len(data) < length:
            raise OSError(f"shard {self.file(index)} ends before {self.paths[index]} does")
        return data

    def announce(self, indices: Iterable[int]) -> None:
        """Begin to fetch items of shards in a store."""
        for index in indices if self.reader is not None else ():
            _, offset, length = (int(number) for number in self.places[index])
            cast(StoreReader, self.reader).announce(self.files[self.file(index)], offset, length)

    def label(self, index: int) -> str | None:
        """Return the text of the .cls file or the label in the .json file, else the first folder of the member."""
        if self.labels and self.labels[index]:
            return self.labels[index]
        member = self.paths[index].partition(".tar/")[2]
        first, slash, _ = member.removeprefix("./").partition("/")
        return first if slash else None

    def stamp(self, index: int) -> tuple[int, int]:
        """Return the size of an item and the time of its shard: all images of a modified shard count as modified."""
        assert self.listing is not None
        return int(self.places[index, 2]), self.listing.facts[self.file(index)][1]

    def holds(self, folder: str | Path) -> bool:
        """Return whether an image in this folder would turn the folder of the shards into a folder of images."""
        if self.files:
            return False
        folders = {os.path.realpath(os.path.dirname(shard)) for shard in self.shards}
        return os.path.realpath(folder) in folders or (os.path.isdir(self.root) and is_searched(folder, [self.root]))

    def lost(self, index: int) -> str | None:
        """Return the shard if it has disappeared, and many images with it."""
        shard = self.file(index)
        return None if (stores.exists(shard) if self.files else os.path.exists(shard)) else shard


def _facts(shards: Sequence[str]) -> Facts:
    """Return size and time or version of each shard."""

    def facts_of(shard: str) -> tuple[int, ...]:
        try:
            return fact(shard, True)
        except OSError as error:
            raise UserError(f"shard {shard} cannot be read ({error.strerror}); check the path") from None

    many = is_remote(shards[0])
    return dict(zip(shards, stores.in_parallel(facts_of, shards) if many else map(facts_of, shards), strict=True))


def index_shards(shards: Sequence[str], facts: Facts, open_shard: Opener) -> Listing:
    """Index the images of all shards; a damaged shard is named under `problems`, its readable images are listed."""
    return build_listing(shards, partial(_read_shards, shards, facts, open_shard))


def _read_shards(shards: Sequence[str], facts: Facts, open_shard: Opener, storage: Storage) -> Listing:
    builder, problems = ListingBuilder(storage), dict[str, str]()
    num_threads = min(SHARDS_AT_ONCE, len(shards)) if is_remote(shards[0]) else 1
    titles = shard_titles(shards)
    with ProgressCount("indexing", "images") as tally, ThreadPool(num_threads, "index") as pool:
        pending = deque[Future[_Members]]()
        submitted = 0
        for number, (shard, title) in enumerate(zip(shards, titles, strict=True)):
            for ahead in range(submitted, min(number + 4 * num_threads, len(shards))):  # few, since each holds names
                name = shards[ahead]
                pending.append(pool.submit(_read_members, name, titles[ahead], facts[name][4], open_shard))
                submitted += 1
            try:
                members = pending.popleft().result()
            except tarfile.TarError as error:
                raise UserError(
                    f"shard {shard} cannot be read as an uncompressed tar file ({error}); unpack or fix it"
                ) from None
            except OSError as error:
                raise UserError(f"shard {shard} cannot be read ({error.strerror}); check the path") from None
            names = [name for name, _, _ in members.images]
            places = [(number, offset, size) for _, offset, size in members.images]
            labels = encode(members.labels.get(_stem(name), "") for name in names)
            builder.add(encode(names), places, labels, encode(member_name(name, title) for name in names))
            if members.problem:
                problems[shard] = members.problem
            tally.add(len(names))
    if not len(builder):
        raise UserError(f"the shards ({shards[0]}, ...) hold no image; these count: {' '.join(SUFFIXES)}")
    return builder.listing({shard: facts[shard] for shard in shards}, problems, keyed_by_member=True)


@dataclass
class _Members:
    """The contents of one shard."""

    images: list[tuple[str, int, int]] = field(default_factory=list)  # name, offset, bytes
    labels: dict[str, str] = field(default_factory=dict)  # by stem
    problem: str = ""  # what is wrong with the shard; empty: nothing


def _read_members(shard: str, title: str, size: int, open_shard: Opener) -> _Members:
    """Read the headers of a shard; raise `tarfile.TarError` where there is not even a first one."""
    members = _Members()
    last, count, texts = "", 0, {".cls": LONGEST_LABEL, ".json": LONGEST_JSON}
    with open_shard(shard) as opened, tarfile.open(fileobj=opened, mode="r:") as archive:
        try:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # else a record of every member is kept
                stored = member.isreg() and not member.issparse()
                if stored and member.offset_data + member.size > size:
                    members.problem = f"it is cut off inside {member.name}"
                    break
                last, count = member.name, count + 1
                base = member.name.rpartition("/")[2]
                if not stored or base.startswith("."):
                    continue
                name = f"{title}/{member.name}"
                if base.lower().endswith(SUFFIXES):
                    members.images.append((name, member.offset_data, member.size))
                elif member.size <= texts.get(os.path.splitext(base)[1], -1):
                    file = archive.extractfile(member)
                    assert file is not None  # of a regular member it is not
                    label = file.read().decode("utf-8", "replace").strip()
                    if base.endswith(".cls"):
                        members.labels[_stem(name)] = label
                    elif json_label := _label_in(label):
                        members.labels.setdefault(_stem(name), json_label)
            else:
                members.problem = _end_problem(archive, size)
        except UserError:  # a ValueError too: a store that does not answer says nothing of the shard
            raise
        except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:  # a header can hold anything
            members.problem = _end_problem(archive, size) or f"its header at byte {archive.offset} is broken ({error})"
    if members.problem and not count:
        raise tarfile.ReadError(members.problem)
    if members.problem:
        members.problem += f" after {count} readable members, the last of which is {last}"
    return members


def _label_in(text: str) -> str:
    """Return the label in the text of a .json file, or nothing."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    label = next((values[key] for key in LABELS if key in values), "") if isinstance(values, dict) else ""
    return str(label)[:LONGEST_LABEL].strip() if isinstance(label, str | int) else ""


def _end_problem(archive: tarfile.TarFile, size: int) -> str:
    """Return what is wrong with the end of a shard, where `tarfile` stops without an error; empty: nothing.

    An archive ends with two blocks of 512 zero bytes, filled up to 10240: so do those of GNU tar, Python's tarfile and
    WebDataset's TarWriter, also where the last member fills a record exactly. A single zero block, or a part of one, is
    taken as the end too (GNU tar only warns of it), since no member's header begins with zeros. Anything but zeros
    behind it is more of the shard, of which a part was lost, or another archive.
    """
    assert archive.fileobj is not None  # it is open
    archive.fileobj.seek(archive.offset)
    block = archive.fileobj.read(tarfile.BLOCKSIZE)
    if not block:
        return f"it ends at byte {size} without end-of-archive blocks"
    if not block.strip(b"\0"):
        while rest := archive.fileobj.read(CHUNK):
            if rest.strip(b"\0"):
                return f"there are zeros at byte {archive.offset}, which mark its end, and more behind them,"
        return ""
    if len(block) < tarfile.BLOCKSIZE:
        return f"it is cut off inside a header, at byte {size},"
    return f"the header at byte {archive.offset} is broken or cut off"


def _refusal(listing: Listing) -> str:
    shard, problem = next(iter(listing.problems.items()))
    several = f"{len(listing.problems)} of {len(listing.facts)} shards are damaged, the first one is {shard}"
    subject = f"shard {shard} is damaged" if len(listing.problems) == 1 else several
    return (
        f"{subject}: {problem}; write it again, or set data.allow_damaged_shards=true to pretrain on what can be read"
    )


def _stem(name: str) -> str:
    """Return a member's name up to the first dot of its last part, by which WebDataset groups members."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]
