"""Tar shards: images read at random through an index of where each lies. Nothing is ever unpacked."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adclr.config import UserError
from adclr.listing import Facts, Listing, fact
from adclr.progress import Tally
from adclr.sources import SUFFIXES, Items, is_searched

LONGEST_LABEL = 256  # bytes of a .cls file


class TarShards(Items):
    """The images of uncompressed tar files, named SHARD/MEMBER, in the order of shards and members.

    A label is the text of the .cls file beside an image (as WebDataset has it), else the first folder of its name.
    """

    def __init__(self, root: str | Path, shards: Sequence[str], listing: Listing | None = None) -> None:
        shards = list(dict.fromkeys(str(shard) for shard in shards))  # patterns may name one twice
        if listing is None or list(listing.facts) != shards:
            listing = index_shards(shards)
        super().__init__(Path(root), listing.names, listing)
        self.shards, self.places, self.labels = list(listing.facts), listing.places, listing.labels

    def file(self, index: int) -> str:
        return self.shards[int(self.places[index, 0])]

    def read(self, index: int) -> bytes:
        _, offset, length = (int(number) for number in self.places[index])
        with open(self.file(index), "rb") as file:  # 6 microseconds, measured; held open, thousands would be too many
            file.seek(offset)
            data = file.read(length)
        if len(data) < length:
            raise OSError(f"shard {self.file(index)} ends before {self.paths[index]} does")
        return data

    def label(self, index: int) -> str | None:
        if self.labels and self.labels[index]:
            return self.labels[index]
        member = self.paths[index].partition(".tar/")[2]
        first, slash, _ = member.removeprefix("./").partition("/")
        return first if slash else None

    def stamp(self, index: int) -> tuple[int, int]:
        """The time is the shard's: all its images are taken for modified when it is."""
        assert self.listing is not None
        return int(self.places[index, 2]), self.listing.facts[self.file(index)][1]

    def holds(self, folder: str | Path) -> bool:
        """An image beside the shards, or below their folder, would make that a folder of images."""
        return super().holds(folder) or (os.path.isdir(self.root) and is_searched(folder, [self.root]))

    def lost(self, index: int) -> str | None:
        """A shard that is gone takes many images with it, wherever the others are."""
        shard = self.file(index)
        return None if os.path.exists(shard) else shard


def index_shards(shards: Sequence[str]) -> Listing:
    names: list[str] = []
    places: list[tuple[int, int, int]] = []
    labels: dict[str, str] = {}
    facts: Facts = {}
    titles = _titles(shards)
    with Tally("indexing", "images") as tally:
        for number, shard in enumerate(shards):
            before = len(names)
            try:
                facts[str(shard)] = fact(shard, True)
                with tarfile.open(shard, "r:") as archive:
                    for member in archive:
                        base = member.name.rpartition("/")[2]
                        if not member.isreg() or member.issparse() or base.startswith("."):
                            continue
                        name = f"{titles[number]}/{member.name}"
                        if base.lower().endswith(SUFFIXES):
                            names.append(name)
                            places.append((number, member.offset_data, member.size))
                        elif base.endswith(".cls") and member.size <= LONGEST_LABEL:
                            file = archive.extractfile(member)
                            assert file is not None  # of a regular member it is not
                            labels[_stem(name)] = file.read().decode("utf-8", "replace").strip()
                        archive.members = []  # type: ignore[attr-defined]  # else a record of every member is kept
            except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:  # a header can hold anything
                raise UserError(
                    f"shard {shard} cannot be read as an uncompressed tar file ({error}); unpack or mend it"
                ) from None
            except OSError as error:
                raise UserError(f"shard {shard} cannot be read ({error.strerror}); check the path") from None
            tally.add(len(names) - before)
    if not names:
        raise UserError(f"the shards ({shards[0]}, ...) hold no image; these count: {' '.join(SUFFIXES)}")
    told = [labels.get(_stem(name), "") for name in names] if labels else []
    return Listing(names, facts, np.array(places, np.int64).reshape(-1, 3), told)


def _titles(shards: Sequence[str]) -> list[str]:
    """What shards are called in names: their file names, or, where these repeat, their paths below what they share."""
    bases = [Path(shard).name for shard in shards]
    if len(set(bases)) == len(bases):
        return bases
    shared = os.path.commonpath([os.path.dirname(os.path.abspath(shard)) for shard in shards])
    return [os.path.relpath(shard, shared) for shard in shards]


def _stem(name: str) -> str:
    """A member's name up to the first dot of its last part: what WebDataset holds together."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]
