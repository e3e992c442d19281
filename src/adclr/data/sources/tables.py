"""Images in Parquet and Arrow files: a column of bytes, or of structs of bytes and path, as Hugging Face stores them.

Nothing is unpacked to a disk: an image of a Parquet file is decoded with its row group, of which the last used stay in
memory; one of an Arrow file is read from where it lies. An image's name, and so its key, is its path if all have one
and all differ; else FILE/ROW.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from adclr.config.parsing import UserError
from adclr.data.listing import fact
from adclr.data.sources import Source
from adclr.data.sources.store_reader import BLOCK, NUM_AHEAD, StoreReader
from adclr.data.sources.table_files import (
    ParquetFile,
    TableFile,
    column_values,
    image_column,
    label_column,
    open_table,
    path_column,
)
from adclr.system import machine, stores
from adclr.system.optional import require
from adclr.system.outputs import is_searched
from adclr.system.progress import track
from adclr.system.store_urls import base_name, is_remote
from adclr.system.stores import StoreFile

SUFFIXES = (".parquet", ".arrow")
MEMORY_SHARE = 0.2  # of the free memory, divided by the processes here, for row groups that were decoded


class Tables(Source):
    """The images of Parquet or Arrow files, in the order of files and rows."""

    def __init__(self, root: str | Path, files: Sequence[str]) -> None:
        require("pyarrow", "embed", f"reading {base_name(os.fspath(files[0]))}")
        remote = is_remote(files[0])
        self.files = stores.in_parallel(stores.stat, files) if remote else [_local_file(file) for file in files]
        self.reader = StoreReader(sum(file.size for file in self.files)) if remote else None
        self.num_ahead = NUM_AHEAD if remote else 0
        self._tables: dict[int, TableFile] = {}  # by file; those of Parquet are opened again for each group
        self._lock = threading.Lock()
        self._decoded: OrderedDict[int, Future[list[bytes | None]]] = OrderedDict()  # by group
        self._sizes: dict[int, int] = {}  # bytes of the decoded groups
        self._capacity = MEMORY_SHARE * machine.host_memory() / max(1, machine.num_processes())
        self.groups: list[tuple[int, int]] = []  # number of the file, and of the group in it
        self.labels: list[str | None] = []
        first_rows: list[int] = []
        paths: list[str | None] = []
        rows: list[str] = []
        for number, file in enumerate(track(self.files, "indexing", len(files), show=len(files) > 1)):
            table = self._open(number)
            own_paths, labels = _names_and_labels(table, file.url)
            ends = np.cumsum(table.rows).tolist()
            for group, (end, count) in enumerate(zip(ends, table.rows, strict=True)):
                if count:
                    self.groups.append((number, group))
                    first_rows.append(len(paths) + end - count)
            rows += [f"{base_name(file.url)}/{row:09d}" for row in range(len(own_paths))]
            paths += own_paths
            self.labels += labels
        if not paths:
            raise UserError(f"{root} has no rows; write it again")
        if all(paths) and len(set(paths)) == len(paths):
            names = [f"{path}" for path in paths]
        else:  # files of one name can lie in several folders
            names = rows if len(set(rows)) == len(rows) else [f"{row:09d}" for row in range(len(rows))]
        super().__init__(str(root) if remote else Path(root), names)
        self.first_rows = np.array(first_rows)

    def _open(self, number: int) -> TableFile:
        known = self._tables.get(number)
        if known is not None and not isinstance(known, ParquetFile):
            return known
        table = open_table(self.files[number], self.reader, None if known is None else known.metadata)
        self._tables[number] = table
        return table

    def _group_of(self, index: int) -> int:
        return int(np.searchsorted(self.first_rows, index, side="right")) - 1

    def file(self, index: int) -> str:
        """Return the file of an image."""
        return self.files[self.groups[self._group_of(index)][0]].url

    def read(self, index: int) -> bytes:
        """Return the encoded image of a row."""
        group = self._group_of(index)
        row = index - int(self.first_rows[group])
        number, inside = self.groups[group]
        table = self._tables[number]
        if isinstance(table, ParquetFile):
            data = self._rows(group)[row]
        else:
            column = image_column(table.schema, self.file(index))
            data = _image_bytes(table.table(inside, [column]).column(column)[row].as_py())
        if data is None:
            raise OSError("the table has no image here")
        return data

    def _rows(self, group: int) -> list[bytes | None]:
        """Return the images of a row group, which one thread decodes while others that want it wait."""
        with self._lock:
            future = self._decoded.get(group)
            is_mine = future is None
            if future is None:
                future = self._decoded[group] = Future()
            self._decoded.move_to_end(group)
        if not is_mine:
            return future.result()
        try:
            rows = self._decode(group)
        except BaseException as error:
            with self._lock:
                del self._decoded[group]
            future.set_exception(error)
            raise
        future.set_result(rows)
        with self._lock:
            self._sizes[group] = sum(len(row) for row in rows if row is not None)
            while sum(self._sizes.values()) > self._capacity and len(self._sizes) > 1:
                oldest = next(key for key in self._decoded if key in self._sizes)
                del self._decoded[oldest], self._sizes[oldest]
        return rows

    def _decode(self, group: int) -> list[bytes | None]:
        from pyarrow import ArrowException

        number, inside = self.groups[group]
        table, file = self._open(number), self.files[number].url
        column = image_column(table.schema, file)
        try:
            return [_image_bytes(value) for value in table.table(inside, [column]).column(column).to_pylist()]
        except FileNotFoundError:
            raise
        except (ArrowException, OSError) as error:  # broken pages are of either kind
            raise OSError(f"row group {inside} of {file} is damaged ({error})") from None

    def announce(self, indices: Iterable[int]) -> None:
        """Begin to fetch the parts of files in a store that hold these rows."""
        if self.reader is None:
            return
        for group in sorted({self._group_of(index) for index in indices} - self._decoded.keys()):
            number, inside = self.groups[group]
            table, file = self._tables[number], self.files[number]
            start, length = table.extent(inside, image_column(table.schema, file.url))
            for block in range(start // BLOCK, -(-(start + length) // BLOCK)):
                self.reader.announce(file, block * BLOCK, min(BLOCK, file.size - block * BLOCK))

    def label(self, index: int) -> str | None:
        """Return the label in its column, else the first folder of the path."""
        label = self.labels[index]
        return super().label(index) if label is None and "/" in self.paths[index] and self._has_paths else label

    @property
    def _has_paths(self) -> bool:
        """Return whether names are paths of images, and not FILE/ROW."""
        return self.paths[0] != f"{base_name(self.files[self.groups[0][0]].url)}/{0:09d}"

    def stamp(self, index: int) -> tuple[int, int]:
        """Return the bytes of the file of an image, and its time or version: all its images count as replaced."""
        file = self.files[self.groups[self._group_of(index)][0]]
        return file.size, file.version

    def lost(self, index: int) -> str | None:
        """Return the file of an image if it has disappeared."""
        file = self.file(index)
        return None if (stores.exists(file) if self.reader else os.path.exists(file)) else file

    def holds(self, folder: str | Path) -> bool:
        """Return whether a file in this folder could turn a folder of tables into one of images, or be read with them.

        The folder counts also where a single table in it was named.
        """
        if self.reader is not None:
            return False
        folders = {os.path.dirname(os.path.abspath(file.url)) for file in self.files}
        return is_searched(folder, [self.root] if os.path.isdir(self.root) else []) or (
            os.path.realpath(folder) in {os.path.realpath(path) for path in folders}
        )


def _local_file(file: str) -> StoreFile:
    """Return size and time of a file on this machine."""
    try:
        facts = fact(file, True)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); check the path") from None
    return StoreFile(file, facts[4], facts[1])


def _names_and_labels(table: TableFile, file: str) -> tuple[list[str | None], list[str | None]]:
    """Return the path and the label of each row of a file, None where there is none."""
    images = image_column(table.schema, file)
    path, (label, class_names) = path_column(table.schema, images), label_column(table.schema)
    paths: list[str | None] = []
    labels: list[str | None] = []
    for group, count in enumerate(table.rows):
        columns = table.table(group, [name for name in (path, label) if name]) if path or label else None
        own_paths = column_values(columns, path) if path else [None] * count
        own_labels = column_values(columns, label) if label else [None] * count
        paths += [value if isinstance(value, str) and value else None for value in own_paths]
        labels += [_class_name(value, class_names) for value in own_labels]
    return paths, labels


def _class_name(value: Any, names: Sequence[str]) -> str | None:
    if isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    return (
        str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value not in ("", -1) else None
    )


def _image_bytes(value: Any) -> bytes | None:
    data = value.get("bytes") if isinstance(value, dict) else value
    return bytes(data) if data else None
