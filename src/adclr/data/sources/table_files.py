"""Parquet and Arrow files behind one interface: their groups of rows, and columns of one group; needs pyarrow."""

from __future__ import annotations

import io
import json
from typing import Any

from adclr.config.parsing import UserError
from adclr.data.sources.store_reader import BLOCK, StoredObject, StoreReader
from adclr.system.store_urls import base_name
from adclr.system.stores import StoreFile
from adclr.system.text import one_line

IMAGES = ("image", "img", "jpg", "jpeg", "png", "webp", "bytes", "image_bytes", "content")  # columns tried first
LABELS = ("label", "labels", "cls", "class", "class_name", "category", "fine_label")
PATHS = ("path", "file_name", "filename", "key", "__key__")


class TableFile:
    """A file whose rows are read by groups: `file.rows` of each, `file.table(group, columns)`."""

    rows: list[int]
    schema: Any

    def table(self, group: int, columns: list[str]) -> Any:
        """Return some columns of a group."""
        raise NotImplementedError

    def extent(self, group: int, column: str) -> tuple[int, int]:
        """Return start and length of the bytes of a column in a group; (0, 0) if unknown."""
        raise NotImplementedError


class ParquetFile(TableFile):
    """A Parquet file, with its row groups."""

    def __init__(self, source: Any, metadata: Any = None) -> None:
        from pyarrow import parquet

        self.opened = parquet.ParquetFile(source, metadata=metadata)
        self.metadata, self.schema = self.opened.metadata, self.opened.schema_arrow
        self.rows = [self.metadata.row_group(n).num_rows for n in range(self.metadata.num_row_groups)]

    def table(self, group: int, columns: list[str]) -> Any:
        """Return some columns of a row group."""
        return self.opened.read_row_group(group, columns=columns)

    def extent(self, group: int, column: str) -> tuple[int, int]:
        """Return start and length of the pages of a column in a row group."""
        row_group = self.metadata.row_group(group)
        columns = [row_group.column(n) for n in range(row_group.num_columns)]
        chunks = [chunk for chunk in columns if chunk.path_in_schema.split(".")[0] == column]
        starts = [min(one.data_page_offset, one.dictionary_page_offset or one.data_page_offset) for one in chunks]
        ends = [start + chunk.total_compressed_size for start, chunk in zip(starts, chunks, strict=True)]
        return min(starts), max(ends) - min(starts)


class ArrowFile(TableFile):
    """An Arrow file or stream, with its record batches; on a disk it is mapped, so that a row costs only its bytes."""

    def __init__(self, source: Any) -> None:
        import pyarrow as pa
        from pyarrow import ipc

        try:
            reader = ipc.open_file(source)
            self.batches = [reader.get_batch(n) for n in range(reader.num_record_batches)]
        except pa.ArrowInvalid:  # the format of streams, which the `datasets` package writes
            source.seek(0)
            reader = ipc.open_stream(source)
            self.batches = list(reader)
        self.schema = reader.schema
        self.rows = [batch.num_rows for batch in self.batches]

    def table(self, group: int, columns: list[str]) -> Any:
        """Return some columns of a record batch."""
        import pyarrow as pa

        names = list(dict.fromkeys(column.partition(".")[0] for column in columns))
        return pa.Table.from_batches([self.batches[group]]).select(names)

    def extent(self, group: int, column: str) -> tuple[int, int]:  # noqa: ARG002
        """Return that it is unknown."""
        return 0, 0


def open_table(file: StoreFile, reader: StoreReader | None, metadata: Any = None) -> TableFile:
    """Open a file on this machine, or with a reader in a store; refuse what is not a table."""
    import pyarrow as pa

    source: Any = None if reader is None else io.BufferedReader(StoredObject(reader, file), BLOCK)
    try:
        if base_name(file.url).endswith(".parquet"):
            return ParquetFile(file.url if source is None else source, metadata)
        return ArrowFile(pa.memory_map(file.url) if source is None else pa.PythonFile(source, "r"))
    except UserError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{file.url} cannot be read as a table ({one_line(error)}); write it again") from None


def image_column(schema: Any, file: str) -> str:
    """Return the column of images: bytes, or a struct with bytes; by its name where there are several."""
    import pyarrow as pa

    def is_bytes(kind: Any) -> bool:
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

    def holds_images(kind: Any) -> bool:
        return is_bytes(kind) or bool(
            pa.types.is_struct(kind) and any(f.name == "bytes" and is_bytes(f.type) for f in kind)
        )

    columns = [field.name for field in schema if holds_images(field.type)]
    named = [name for name in IMAGES if name in columns]
    if not columns or (len(columns) > 1 and not named):
        what = f"several columns of bytes ({', '.join(columns)})" if columns else "no column of images"
        raise UserError(f"{file} has {what}, of {', '.join(schema.names)}; call the one of images {IMAGES[0]}")
    return named[0] if named else columns[0]


def path_column(schema: Any, images: str) -> str | None:
    """Return the column of the images' paths: in the struct of images, or beside it; None if there is none."""
    import pyarrow as pa

    kind = schema.field(images).type
    if pa.types.is_struct(kind) and any(field.name == "path" and pa.types.is_string(field.type) for field in kind):
        return f"{images}.path"
    return next((name for name in PATHS if name in schema.names and pa.types.is_string(schema.field(name).type)), None)


def label_column(schema: Any) -> tuple[str | None, list[str]]:
    """Return the column of labels and the names of its numbers, as the `datasets` package describes them."""
    name = next((label for label in LABELS if label in schema.names), None)
    try:
        described = json.loads((schema.metadata or {})[b"huggingface"])
        names = described["info"]["features"][name]["names"]
        return name, [str(one) for one in names]
    except (KeyError, ValueError, TypeError, RecursionError):
        return name, []


def column_values(table: Any, column: str) -> list[Any]:
    """Return the values of a column, or of a field of a struct, as Python's."""
    name, dot, inner = column.partition(".")
    values = table.column(name).to_pylist()
    return [value and value.get(inner) for value in values] if dot else list(values)
