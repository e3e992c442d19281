"""The index of a collection: names, keys and positions of its images as arrays, in memory or mapped from one file.

The file is an .npz archive that is not compressed, so that its arrays are used where they lie: all processes of a
machine share one copy in the system's cache of files. Keys and positions are checked by their checksums when it is
opened; a name is checked by its key, which is a hash of it, when it is used.
"""

from __future__ import annotations

import io
import json
import operator
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, overload

import numpy as np
from numpy.typing import NDArray

from adclr.config.parsing import UserError
from adclr.data.key_order import examine_keys
from adclr.data.random_draws import Keys, key_of
from adclr.system import stores
from adclr.system.files import replacing
from adclr.system.store_urls import is_remote
from adclr.system.text import printable

NO_EXTENTS = np.zeros((0, 3), np.int64)
MAPPED = 2**26  # bytes of an array above which it stays in the file, and its names are checked one by one
BLOCK = 2**24  # bytes that are written or checked at once
NAMES_AT_ONCE = 2**12  # when all are read one after the other
STAT_THREADS, STATS_AT_ONCE = 16, 256  # of folders: for a network file system; a local disk is as fast with fewer
ARCHIVE = 3000  # bytes of an archive beside what is in its arrays
ALIGNMENT, PADDING = 64, 0xD935  # of the arrays in the file, and the kind of zip field that moves them there

Fact = tuple[int, ...]  # 1 if it is a file; mtime and ctime (ns); inode; bytes (0 for a folder)
Facts = dict[str, Fact]


class Names(Sequence[str]):
    """Texts in one array of bytes: 9 bytes each beside their own."""

    def __init__(
        self, text: NDArray[np.uint8], ends: NDArray[np.int64], check: Callable[[int, str], None] | None = None
    ) -> None:
        self.text, self.ends = text, ends  # the byte after each name, which is not part of any
        self.check = check  # raises an error if a name that is used is not the one that was written

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"{index} of {len(self)} names")
        start = int(self.ends[number - 1]) + 1 if number else 0
        name = _decode(self.text[start : int(self.ends[number])].tobytes())
        if self.check is not None:
            self.check(number, name)
        return name

    def __iter__(self) -> Iterator[str]:
        start = 0
        for first in range(0, len(self), NAMES_AT_ONCE):
            ends = (self.ends[first : first + NAMES_AT_ONCE] - start).tolist()
            text, begin = self.text[start : start + ends[-1]].tobytes(), 0
            for end in ends:
                yield _decode(text[begin:end])
                begin = end + 1
            start += begin

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Names | list | tuple):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all names in the file."""
        return self.text.nbytes + self.ends.nbytes


NO_NAMES = Names(np.zeros(0, np.uint8), np.zeros(0, np.int64))


@dataclass(frozen=True, eq=False)
class Listing:
    """The index of a collection: its items, and by what a change of it is noticed."""

    names: Names  # of all items, in order
    keys: Keys
    facts: Facts  # of each folder or shard, by its full path
    places: NDArray[np.int64] = field(default_factory=NO_EXTENTS.copy)  # n×3: shard (in `facts`), offset, bytes; or 0×3
    labels: Names = field(default_factory=lambda: NO_NAMES)  # one for each item, or none at all
    problems: dict[str, str] = field(default_factory=dict)  # by full path: damaged shards, dangling links
    keyed_by_member: bool = False  # of shards: keys do not depend on the shard; false in indexes of version 0.1
    file: Path | None = None  # in which all of this is
    known_fingerprint: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of all keys."""
        return self.known_fingerprint or examine_keys(self.keys).fingerprint

    @property
    def nbytes(self) -> int:
        """Return about the bytes of the file."""
        arrays = self.names.nbytes + self.keys.nbytes + self.places.nbytes + self.labels.nbytes
        return ARCHIVE + arrays + 100 * len(self.facts)

    def current(self) -> bool:
        """Return whether the collection is still what was indexed."""
        local = [path for path in self.facts if not is_remote(path)]
        try:
            same = all(_in_threads(lambda path: fact(path, bool(self.facts[path][0])) == self.facts[path], local))
            remote = [path for path in self.facts if is_remote(path)] if same else []
            same = same and stores.in_parallel(lambda path: fact(path, True), remote) == [self.facts[p] for p in remote]
        except OSError:
            return False
        # the folder of a link does not change when the file that the link points to is restored
        return same and not any(path not in self.facts and os.path.exists(path) for path in self.problems)

    def save(self, path: Path) -> None:
        """Write the index to one .npz file, whole or not at all; one that is in a file already is linked or copied."""
        if self.file is not None and os.path.realpath(self.file) == os.path.realpath(path):
            return
        with replacing(path) as temporary:
            if self.file is not None:
                with suppress(OSError):  # another disk, a file system without links, or a file that was deleted
                    os.link(self.file, temporary)
                    return
                with suppress(OSError):
                    shutil.copyfile(self.file, temporary)
                    return
            with open(temporary, "wb") as file, zipfile.ZipFile(file, "w") as archive:
                for name, array in self._arrays().items():
                    _write_array(archive, file, name, array)

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {
            "names": self.names.text,
            "ends": self.names.ends,
            "keys": self.keys,
            "places": self.places,
            "labels": self.labels.text,
            "label_ends": self.labels.ends,
            "facts": _json(self.facts),
            "problems": _json(self.problems),
            "keyed_by_member": np.array(self.keyed_by_member),
            "fingerprint": _json(self.fingerprint),
        }


def load_listing(path: Path) -> Listing | None:
    """Return the index in a file; None if it cannot be read, or is damaged where that can be seen at once."""
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            return _read_listing(path, file, archive)
    except Exception:  # whatever is wrong with it, the collection can be indexed again
        return None


def _read_listing(path: Path, file: IO[bytes], archive: zipfile.ZipFile) -> Listing:
    stored = {member.filename.removesuffix(".npy") for member in archive.infolist()}

    def array(name: str, dtype: type[np.generic], dims: int = 1, whole: bool = True) -> NDArray[Any]:
        return _read_array(file, archive.getinfo(f"{name}.npy"), np.dtype(dtype), dims, whole)

    def names(name: str, ends: str, check: Callable[[int, str], None] | None = None) -> Names:
        text = array(name, np.uint8, whole=False)
        if ends in stored:
            return Names(text, array(ends, np.int64, whole=False), check)
        # of version 0.1
        return Names(text, np.append(np.flatnonzero(text == 0), len(text)) if len(text) else NO_NAMES.ends)

    facts = {str(k): tuple(int(n) for n in v) for k, v in json.loads(array("facts", np.uint8).tobytes()).items()}
    problems = {str(k): str(v) for k, v in json.loads(array("problems", np.uint8).tobytes()).items()}
    places, labels = array("places", np.int64, 2), names("labels", "label_ends")
    titles = shard_titles(list(facts)) if len(places) else []
    keyed = "keyed_by_member" in stored and bool(array("keyed_by_member", np.bool_, 0))
    if "keys" in stored:
        keys = array("keys", np.uint64)
        listed = names("names", "ends", _NameCheck(path, keys, places, titles))
        fingerprint = str(json.loads(array("fingerprint", np.uint8).tobytes()))
        listing = Listing(listed, keys, facts, places, labels, problems, keyed, path, fingerprint)
    else:
        listed = names("names", "ends")
        keys = _keys_of(listed, places, titles if keyed else [])
        listing = Listing(listed, keys, facts, places, labels, problems, keyed)
    count = len(listed)
    _require(count > 0, "it names no image")
    _require(len(facts) > 0, "it names no folder")
    _require(len(keys) == count, "not as many keys as names")
    _require(places.shape in ((count, 3), (0, 3)), "not as many positions as names")
    _require(len(labels) in (0, count), "not as many labels as names")
    shards = places[:, 0]
    _require(not len(shards) or 0 <= shards.min() <= shards.max() < len(facts), "shards that are not listed")
    return listing


@dataclass(frozen=True)
class _NameCheck:
    """Raises an error if a name from a file is not the one of which its key is a hash, or leads out of the folder."""

    path: Path
    keys: Keys
    places: NDArray[np.int64]
    titles: list[str]

    def __call__(self, index: int, name: str) -> None:
        if len(self.places):
            title = self.titles[self.places[index, 0]]
            texts, inside = [name, member_name(name, title)], name.startswith(f"{title}/")
        else:
            texts, inside = [name], not (name.startswith("/") or ".." in name.split("/"))
        if int(self.keys[index]) not in map(key_of, texts) or not inside:
            raise UserError(printable(f"index {self.path} is damaged at image {index}; delete it and begin again"))


def _keys_of(names: Names, places: NDArray[np.int64], titles: Sequence[str]) -> Keys:
    """Return the keys of names; where titles of shards are given, of the names in them, if these all differ."""
    if titles:
        shards = places[:, 0].tolist()
        members = (member_name(name, titles[shard]) for name, shard in zip(names, shards, strict=True))
        keys = np.fromiter(map(key_of, members), np.uint64, len(names))
        if examine_keys(keys).distinct:
            return keys
    return np.fromiter(map(key_of, names), np.uint64, len(names))


def member_name(name: str, title: str) -> str:
    """Return the name of an image in its shard."""
    return name[len(title) + 1 :].removeprefix("./")


def shard_titles(shards: Sequence[str]) -> list[str]:
    """Return the names of the shards: their file names, or, where these repeat, paths below their common folder."""
    bases = [Path(shard).name for shard in shards]
    if len(set(bases)) == len(bases):
        return bases
    shared = os.path.commonpath([os.path.dirname(os.path.abspath(shard)) for shard in shards])
    return [os.path.relpath(shard, shared) for shard in shards]


def fact(path: str | Path, is_file: bool) -> Fact:
    """Return the facts of a file or folder, by which a change of it is noticed."""
    if is_remote(str(path)):
        stored = stores.stat(str(path))
        return 1, stored.version, 0, 0, stored.size
    status = os.stat(path)
    size = status.st_size if is_file else 0
    return int(is_file), status.st_mtime_ns, status.st_ctime_ns, status.st_ino, size


def _in_threads(function: Callable[[str], bool], paths: Sequence[str]) -> Iterator[bool]:
    """Yield what a function returns for each path; many are asked for by threads."""
    if len(paths) <= STATS_AT_ONCE:
        yield from map(function, paths)
        return
    parts = [paths[first : first + STATS_AT_ONCE] for first in range(0, len(paths), STATS_AT_ONCE)]
    with ThreadPoolExecutor(STAT_THREADS) as pool:
        for results in pool.map(lambda part: [function(path) for path in part], parts):
            yield from results


def _write_array(archive: zipfile.ZipFile, file: IO[bytes], name: str, array: NDArray[Any]) -> None:
    """Write an array as a member that is neither compressed nor held in memory, at a multiple of 64 bytes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    info = zipfile.ZipInfo(f"{name}.npy")
    start = file.tell() + 30 + len(info.filename) + 20 + 4  # fields of the member, of its size, and of the padding
    padding = -start % ALIGNMENT
    info.extra = struct.pack("<HH", PADDING, padding) + bytes(padding)
    with archive.open(info, "w", force_zip64=True) as member:
        member.write(header.getvalue())
        flat = array.reshape(-1)
        step = BLOCK // array.itemsize
        for first in range(0, len(flat), step):
            member.write(flat[first : first + step].tobytes())


def _read_array(
    file: IO[bytes], info: zipfile.ZipInfo, dtype: np.dtype[Any], dims: int, whole: bool
) -> NDArray[np.generic]:
    """Return an array of an archive: in memory if it is small, else in the file; raise an error if it is damaged.

    `whole` tells whether the checksum of a large one is compared too.
    """
    _require(info.compress_type == zipfile.ZIP_STORED, "not written by `save`, and of any size once it is unpacked")
    file.seek(info.header_offset)
    name_length, extra_length = struct.unpack("<26xHH", file.read(30))
    start = info.header_offset + 30 + name_length + extra_length
    file.seek(start)
    _require(np.lib.format.read_magic(file) == (1, 0), "of another version")
    shape, fortran, stored_dtype = np.lib.format.read_array_header_1_0(file)
    skip = file.tell() - start
    _require(stored_dtype == dtype, "of another type")
    _require(len(shape) == dims, "of other dimensions")
    _require(not fortran or dims < 2, "of another layout")
    count = 1
    for length in shape:
        count *= length
    _require(skip + count * dtype.itemsize == info.file_size, "of another size")
    _require(start + info.file_size <= os.fstat(file.fileno()).st_size, "cut off")
    mapped = np.asarray(np.memmap(file, np.uint8, "r", start, (info.file_size,)))
    small, checksum = info.file_size <= MAPPED, 0
    if whole or small:
        for first in range(0, len(mapped), BLOCK):
            checksum = zlib.crc32(mapped[first : first + BLOCK].data, checksum)
        _require(checksum == info.CRC, "damaged")
    array = mapped[skip:].view(dtype).reshape(shape)
    return array.copy() if small else array  # what is in memory, no change of the file can spoil


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


def _json(value: Any) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)
