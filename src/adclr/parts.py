"""Features on disk, part by part, so that an embedding that was stopped goes on, repeats no row and loses none.

A part is the rows of a run of so many images. Its file is written first, its record last, each whole or not at all; a
part without a record is made again. Names with an underscore are passed over by programs that read a folder as one
table:

    FOLDER/part-000000.{parquet, safetensors, npy}  the rows
    FOLDER/_done/000000.json                        what became of the images of a part, until all are done
    FOLDER/_embed.json                              what was embedded, and how
    FOLDER/_unreadable.jsonl                        what could not be, and why
    FOLDER/index.jsonl                              where the patch map of each image lies

For one file, FILE.parquet, the folder is FILE.parquet.parts, which goes away when the parts have been put together;
FILE.parquet.json and FILE.parquet.unreadable.jsonl lie beside it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from adclr.config import UserError
from adclr.runs import read_json, sync, write_json

Format = Literal["parquet", "safetensors", "npy"]
Facts = Mapping[str, Any]
Rows = Sequence[tuple[str, NDArray[Any]]]  # the name of an image and its vector (D) or patch map (height×width×D)


def readable(name: str) -> str:
    """A name as text that every program can read: bytes that are not UTF-8 become \\udcNN."""
    return name.encode("utf-8", "backslashreplace").decode()


class Parts:
    """`with parts.open(): [parts.write(n, ...) for n in parts.missing()]; parts.finish({})`"""

    def __init__(self, out: Path, kind: Format, count: int, size: int, facts: Facts) -> None:
        self.out, self.kind, self.count, self.size, self.facts = out, kind, count, size, dict(facts)
        self.single = out.suffix == ".parquet"
        self.folder = out.with_name(f"{out.name}.parts") if self.single else out
        self.done = self.folder / "_done"
        self.about = out.with_name(f"{out.name}.json") if self.single else out / "_embed.json"
        self.unreadable = out.with_name(f"{out.name}.unreadable.jsonl") if self.single else out / "_unreadable.jsonl"

    @staticmethod
    def check(out: Path, kind: Format) -> None:
        """What can be refused before any image is looked for."""
        if kind == "parquet" and importlib.util.find_spec("pyarrow") is None:
            raise UserError("Parquet files are written by pyarrow, which is missing; run: pip install 'adclr[embed]'")
        if out.suffix == ".parquet" and kind != "parquet":
            raise UserError(f"patch maps are several files, and {out} is the name of one; give that of a folder")
        if out.suffix == ".parquet" and os.path.isdir(out):
            raise UserError(f"{out} is a folder; give the name of a file, or a folder that does not end in .parquet")
        if out.suffix != ".parquet" and os.path.isfile(out):
            raise UserError(f"{out} is a file; give the name of a folder, or of a .parquet file")

    # -- what is there --

    def finished(self) -> dict[str, Any] | None:
        """What was said at the end, if the end was reached; whatever is there and does not belong here is refused."""
        there = self.out.exists() if self.single else self.out.is_dir() and any(self.out.iterdir())
        if not there:
            return None
        if not self.about.exists():
            raise UserError(f"{self.out} exists and was not made by this; choose another --out or delete it")
        about = self._same(self.about)
        if about.get("finished"):
            shutil.rmtree(self.folder if self.single else self.done, ignore_errors=True)  # what a crash may have left
        return about if about.get("finished") else None

    def _same(self, file: Path) -> dict[str, Any]:
        """What a file says of an embedding, which must be this one."""
        about = read_json(file)
        if not isinstance(about, dict):
            raise UserError(f"{file} is damaged; delete it and what lies beside it, or choose another --out")
        for name, value in self.facts.items():
            if about.get(name) != value:
                known = name in ("weights", "images")
                what = f"other {name}" if known else f"{name}={about.get(name)} where {value} was asked for"
                raise UserError(f"{self.out} was made with {what}; choose another --out or delete it")
        return about

    @contextmanager
    def open(self) -> Iterator[None]:
        """The folder, for one process at a time, without what a crash left half-written."""
        self.done.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "a", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another process is writing to {self.folder}; wait for it or stop it") from None
            except OSError:
                pass  # a file system without locks
            about = self.folder / "_embed.json"
            if about.exists():
                self._same(about)
            else:
                write_json(about, self.facts | {"finished": False})
            for half in [*self.folder.glob(".*.tmp"), *self.done.glob(".*.tmp")]:
                half.unlink()
            try:
                yield
            finally:
                if self.done.is_dir() and not any(self.done.glob("*.json")):  # nothing came of it
                    shutil.rmtree(self.folder)

    def missing(self) -> list[int]:
        """The parts that are yet to be made."""
        return [n for n in range(-(-self.count // self.size)) if not (self.done / f"{n:06d}.json").exists()]

    def indices(self, number: int) -> NDArray[np.int64]:
        """The images of a part."""
        return np.arange(number * self.size, min((number + 1) * self.size, self.count))

    # -- what comes to it --

    def write(self, number: int, rows: Rows, unreadable: Mapping[str, str]) -> None:
        """A part: rows in the order of the images, and why the others are missing."""
        name = f"part-{number:06d}.{self.kind}"
        record: dict[str, Any] = {"file": name if rows else None, "rows": len(rows), "unreadable": dict(unreadable)}
        if rows:
            write = {"parquet": self._write_parquet, "safetensors": _write_safetensors, "npy": _write_npy}[self.kind]
            record["maps"] = whole_or_not(self.folder / name, lambda path: write(path, rows))
        write_json(self.done / f"{number:06d}.json", record)

    def _write_parquet(self, path: Path, rows: Rows) -> list[Any]:
        import pyarrow as pa
        from pyarrow import parquet

        values = np.stack([value for _, value in rows])
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        table = pa.table({"path": [readable(name) for name, _ in rows], "vector": vectors})
        told = table.replace_schema_metadata({"adclr": json.dumps(self.facts)})
        parquet.write_table(told, path, use_dictionary=False, compression="none")  # neither would make it smaller
        return []

    def records(self) -> Iterator[dict[str, Any]]:
        for file in sorted(self.done.glob("*.json")):
            yield read_json(file)

    def finish(self, more: Facts) -> dict[str, Any]:
        """Puts together what is one thing in the end, and sums up."""
        records = list(self.records())
        rows = sum(record["rows"] for record in records)
        unreadable = [(path, reason) for record in records for path, reason in record["unreadable"].items()]
        if not rows:
            shutil.rmtree(self.folder)
            raise UserError(f"none of the {self.count} images can be read, the first for this: {unreadable[0][1]}")
        if unreadable:
            _write_lines(self.unreadable, ({"path": readable(path), "reason": why} for path, why in unreadable))
        about = self.facts | {"finished": True, "rows": rows, "unreadable": len(unreadable)} | dict(more)
        if self.kind != "parquet":
            names = ("shard", "path", "key", "height", "width")
            maps = ([record["file"], *row] for record in records for row in record.get("maps", ()))
            _write_lines(self.folder / "index.jsonl", (dict(zip(names, row, strict=True)) for row in maps))
        write_json(self.about, about)
        if self.single:
            files = [self.folder / record["file"] for record in records if record["file"]]
            whole_or_not(self.out, lambda path: _together(path, files))
            shutil.rmtree(self.folder)
        else:
            shutil.rmtree(self.done)
            (self.folder / ".lock").unlink(missing_ok=True)
        return about


def whole_or_not(path: Path, write: Callable[[Path], Any]) -> Any:
    """Writes beside, syncs, renames."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        found = write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written ({error}); see to it, and the same command goes on") from None
    return found


def _write_lines(path: Path, rows: Iterable[Facts]) -> None:
    def write(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    whole_or_not(path, write)


def _write_safetensors(path: Path, rows: Rows) -> list[Any]:
    """One tensor, height×width×D, for each image, named by its number in the part."""
    from safetensors.numpy import save_file

    save_file({f"{number:06d}": np.ascontiguousarray(value) for number, (_, value) in enumerate(rows)}, path)
    return [[readable(name), f"{number:06d}", *value.shape[:2]] for number, (name, value) in enumerate(rows)]


def _write_npy(path: Path, rows: Rows) -> list[Any]:
    """The patches of all images one behind the other; the key of an image is its first row."""
    counts = [value.shape[0] * value.shape[1] for _, value in rows]
    starts = (np.cumsum(counts) - counts).tolist()
    with open(path, "wb") as file:
        np.save(file, np.concatenate([value.reshape(-1, value.shape[-1]) for _, value in rows]), allow_pickle=False)
    return [[readable(name), start, *value.shape[:2]] for start, (name, value) in zip(starts, rows, strict=True)]


def _together(path: Path, files: list[Path]) -> None:
    """Parquet files as one, a part a row group, one in memory at a time."""
    from pyarrow import parquet

    with parquet.ParquetWriter(path, parquet.read_schema(files[0]), use_dictionary=False, compression="none") as writer:
        for file in files:
            writer.write_table(parquet.read_table(file))
