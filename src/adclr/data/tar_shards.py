"""Tar shards: images are read through an index of their positions, in any order; nothing is unpacked to disk."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from adclr.config.parsing import UserError
from adclr.data.sources import SUFFIXES, Facts, Listing, Source, fact, is_searched
from adclr.system.progress import ProgressCount

LONGEST_LABEL = 256  # bytes of a .cls file


class TarShards(Source):
    """The images of uncompressed tar files, named SHARD/MEMBER, in the order of shards and members.

    A label is the text of the .cls file beside an image (as WebDataset has it), else the first folder of its name.
    """

    def __init__(
        self, root: str | Path, shards: Sequence[str], listing: Listing | None = None, allow_damaged: bool = False
    ) -> None:
        shards = list(dict.fromkeys(str(shard) for shard in shards))  # patterns may name one twice
        if listing is None or list(listing.facts) != shards:
            listing = index_shards(shards)
        if listing.problems and not allow_damaged:
            raise UserError(_refusal(listing))
        super().__init__(Path(root), listing.names, listing)
        self.shards, self.places, self.labels = list(listing.facts), listing.places, listing.labels

    def file(self, index: int) -> str:
        """Return the shard of an item."""
        return self.shards[int(self.places[index, 0])]

    def read(self, index: int) -> bytes:
        """Return the bytes of a member."""
        _, offset, length = (int(number) for number in self.places[index])
        with open(self.file(index), "rb") as file:  # 6 microseconds, measured; held open, thousands would be too many
            file.seek(offset)
            data = file.read(length)
        if len(data) < length:
            raise OSError(f"shard {self.file(index)} ends before {self.paths[index]} does")
        return data

    def label(self, index: int) -> str | None:
        """Return the text of the .cls file, else the first folder of the member's name."""
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
        return super().holds(folder) or (os.path.isdir(self.root) and is_searched(folder, [self.root]))

    def lost(self, index: int) -> str | None:
        """Return the shard if it has disappeared, and many images with it."""
        shard = self.file(index)
        return None if os.path.exists(shard) else shard


def index_shards(shards: Sequence[str]) -> Listing:
    """Index the images of all shards; a damaged shard is named under `problems`, its readable images are listed."""
    names: list[str] = []
    places: list[tuple[int, int, int]] = []
    labels: dict[str, str] = {}
    facts: Facts = {}
    problems: dict[str, str] = {}
    with ProgressCount("indexing", "images") as tally:
        for number, (shard, title) in enumerate(zip(shards, _titles(shards), strict=True)):
            try:
                facts[shard] = fact(shard, True)
                members = _read_members(shard, title)
            except tarfile.TarError as error:
                raise UserError(
                    f"shard {shard} cannot be read as an uncompressed tar file ({error}); unpack or mend it"
                ) from None
            except OSError as error:
                raise UserError(f"shard {shard} cannot be read ({error.strerror}); check the path") from None
            names += [name for name, _, _ in members.images]
            places += [(number, offset, size) for _, offset, size in members.images]
            labels |= members.labels
            if members.problem:
                problems[shard] = members.problem
            tally.add(len(members.images))
    if not names:
        raise UserError(f"the shards ({shards[0]}, ...) hold no image; these count: {' '.join(SUFFIXES)}")
    labels_in_order = [labels.get(_stem(name), "") for name in names] if labels else []
    return Listing(names, facts, np.array(places, np.int64).reshape(-1, 3), labels_in_order, problems)


@dataclass
class _Members:
    """The contents of one shard."""

    images: list[tuple[str, int, int]] = field(default_factory=list)  # name, offset, bytes
    labels: dict[str, str] = field(default_factory=dict)  # by stem
    problem: str = ""  # what is wrong with the shard; empty: nothing


def _read_members(shard: str, title: str) -> _Members:
    """Read the headers of a shard; raise `tarfile.TarError` where there is not even a first one."""
    members = _Members()
    last, count, size = "", 0, os.path.getsize(shard)
    with tarfile.open(shard, "r:") as archive:
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
                elif base.endswith(".cls") and member.size <= LONGEST_LABEL:
                    file = archive.extractfile(member)
                    assert file is not None  # of a regular member it is not
                    members.labels[_stem(name)] = file.read().decode("utf-8", "replace").strip()
            else:
                members.problem = _end_problem(archive, size)
        except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:  # a header can hold anything
            members.problem = _end_problem(archive, size) or f"its header at byte {archive.offset} is broken ({error})"
    if members.problem and not count:
        raise tarfile.ReadError(members.problem)
    if members.problem:
        members.problem += f" after {count} readable members, the last of which is {last}"
    return members


def _end_problem(archive: tarfile.TarFile, size: int) -> str:
    """Return what is wrong with the end of a shard, where `tarfile` stops without an error; empty: nothing.

    An archive ends with two blocks of 512 zero bytes, filled up to 10240: so do those of GNU tar, Python's tarfile and
    WebDataset's TarWriter, also where the last member fills a record exactly. A single zero block, or a part of one, is
    taken as the end too (GNU tar only warns of it), since no member's header begins with zeros.
    """
    assert archive.fileobj is not None  # it is open
    archive.fileobj.seek(archive.offset)
    block = archive.fileobj.read(tarfile.BLOCKSIZE)
    if not block:
        return f"it ends at byte {size} without end-of-archive blocks"
    if not block.strip(b"\0"):
        return ""
    if len(block) < tarfile.BLOCKSIZE:
        return f"it is cut off inside a header, at byte {size},"
    return f"there is no member's header at byte {archive.offset}"


def _refusal(listing: Listing) -> str:
    shard, problem = next(iter(listing.problems.items()))
    several = f"{len(listing.problems)} of {len(listing.facts)} shards are damaged, the first one is {shard}"
    subject = f"shard {shard} is damaged" if len(listing.problems) == 1 else several
    return (
        f"{subject}: {problem}; write it again, or set data.allow_damaged_shards=true to pretrain on what can be read"
    )


def _titles(shards: Sequence[str]) -> list[str]:
    """Return the names of the shards: their file names, or, where these repeat, paths below their common folder."""
    bases = [Path(shard).name for shard in shards]
    if len(set(bases)) == len(bases):
        return bases
    shared = os.path.commonpath([os.path.dirname(os.path.abspath(shard)) for shard in shards])
    return [os.path.relpath(shard, shared) for shard in shards]


def _stem(name: str) -> str:
    """Return a member's name up to the first dot of its last part, by which WebDataset groups members."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]
