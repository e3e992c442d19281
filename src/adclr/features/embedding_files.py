"""Features on disk, part by part, so that a stopped embedding can be resumed without repeating or losing a row.

A part is the rows of a run of so many images. Its file is written first, its record last, each atomically; a part
without a record is written again. Names with an underscore are ignored by programs that read a folder as one table:

    FOLDER/part-000000.{parquet, safetensors, npy}  the rows
    FOLDER/_done/000000.json                        the record of a part, until all are done
    FOLDER/_embed.json                              what was embedded and how, with the stamps of each part
    FOLDER/_unreadable.jsonl                        the images that could not be read, and why
    FOLDER/index.jsonl                              the file and the key of the patch map of each image

For one file, FILE.parquet, the folder is FILE.parquet.parts, which is deleted when the parts have been joined;
FILE.parquet.json and FILE.parquet.unreadable.jsonl are beside it. `embedding_resume` reads the files of an earlier one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from adclr.config.parsing import UserError
from adclr.features import embedding_resume
from adclr.features.embedding_resume import MAP_KEYS, STAMPS, EmbeddingLayout, Facts, Format, PartStamps
from adclr.system import outputs
from adclr.system.files import lock, read_json, sync, write_json
from adclr.system.optional import check_installed
from adclr.system.text import as_utf8

Rows = Sequence[tuple[str, NDArray[Any]]]  # the name of an image and its vector (D) or patch map (height×width×D)


class Parts:
    """`with parts.open(): [parts.write(n, ...) for n in parts.missing()]; parts.finish({})`"""

    def __init__(
        self,
        out: Path,
        kind: Format,
        count: int,
        size: int,
        facts: Facts,
        stamps: PartStamps | None = None,  # None: images count as unchanged
        overwrite: bool = False,
    ) -> None:
        self.out, self.kind, self.count, self.size, self.facts = out, kind, count, size, dict(facts)
        self.stamps, self.overwrite, self.layout = stamps, overwrite, EmbeddingLayout(out, kind)
        self.single, self.folder, self.done = self.layout.single, self.layout.folder, self.layout.done
        self.unreadable = self.layout.unreadable
        self.renewed: list[int] = []  # parts of a finished embedding whose images have changed since

    @staticmethod
    def check(out: Path, kind: Format) -> None:
        """Refuse a combination of file name and format, before images are searched for."""
        if kind == "parquet":
            check_installed("pyarrow", "embed", "writing Parquet files")
        if out.suffix == ".parquet" and kind != "parquet":
            raise UserError(f"patch maps are several files, and {out} is the name of one; give that of a folder")
        if out.suffix == ".parquet" and os.path.isdir(out):
            raise UserError(f"{out} is a folder; give the name of a file, or a folder that does not end in .parquet")
        if out.suffix != ".parquet" and os.path.isfile(out):
            raise UserError(f"{out} is a file; give the name of a folder, or of a .parquet file")

    # -- earlier files --

    def finished(self) -> dict[str, Any] | None:
        """Return the description of the embedding if it is finished and no image has changed since, else None.

        Files of another origin or of another embedding are refused.
        """
        embedding_resume.check_files(self.layout, self.overwrite)
        about = embedding_resume.finished(self.layout, self.facts, self.overwrite)
        self.renewed = [] if about is None else self._changed(about)
        if about is None or self.renewed:
            return None
        shutil.rmtree(self.folder if self.single else self.done, ignore_errors=True)  # leftovers of a crash
        if self.stamps is not None and "parts" in about:
            parts = [{**part, **digests} for part, digests in zip(about["parts"], self.stamps.digests, strict=True)]
            if parts != about["parts"]:  # the same contents with other times
                about["parts"] = parts
                write_json(self.layout.about, about)
        return about

    def _changed(self, about: Facts) -> list[int]:
        return [] if self.stamps is None else embedding_resume.changed(self.layout, about, self.stamps)

    def _forget_changed(self) -> None:
        """Delete the records of parts whose images have changed since they were written."""
        if self.stamps is None:
            return
        for file in self.done.glob("*.json"):
            if not self.stamps.unchanged(int(file.stem), read_json(file), file.stat().st_mtime_ns):
                file.unlink()

    def _reuse(self, about: Facts) -> None:
        """Write records of the valid parts of a finished embedding, so that only the others are embedded again."""
        for number, group, record in embedding_resume.valid_parts(self.layout, about, self._changed(about)):
            if self.layout.record(number).exists():
                continue
            if self.single and record["rows"]:
                extract = partial(embedding_resume.extract_group, source=self.out, group=group)
                _write_atomically(self.layout.part(number), extract)
            write_json(self.layout.record(number), record)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Lock the folder for this process, and remove what a crash left half-written."""
        with lock(self.folder, "writing to"):
            self.done.mkdir(exist_ok=True)
            self._begin()
            try:
                yield
            finally:
                names = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else {""}
                if not any(self.done.glob("*.json")) and names <= {".lock", "_done", "_embed.json"}:
                    shutil.rmtree(self.folder)  # no part was written

    def _begin(self) -> None:
        """Resume an earlier start of the same embedding, reuse a finished one, or begin anew."""
        for leftover in [*self.folder.glob(".*.tmp"), *self.done.glob(".*.tmp")]:
            leftover.unlink()
        started = self.layout.started
        difference = embedding_resume.difference(started, self.facts) if started.exists() else None
        if difference is not None and not self.overwrite:
            raise UserError(f"{self.out} was made with {difference}; {outputs.REMEDY}")
        if difference is not None:
            for record in self.done.glob("*.json"):
                record.unlink()
        self._forget_changed()
        about = embedding_resume.finished(self.layout, self.facts, self.overwrite)
        if about is not None:
            self._reuse(about)
        if difference is not None or not started.exists() or (about is not None and started == self.layout.about):
            write_json(started, self.facts | {"finished": False} | outputs.signature("embed"))

    def missing(self) -> list[int]:
        """Return the parts that are yet to be written."""
        return [n for n in range(-(-self.count // self.size)) if not self.layout.record(n).exists()]

    def num_done(self) -> int:
        """Return how many images the complete parts have."""
        numbers = range(-(-self.count // self.size))
        return sum(len(self.indices(n)) for n in numbers if self.layout.record(n).exists())

    def wait(self) -> bool:
        """Return whether another process has left parts to take over; here there is none."""
        return False

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return the indices of the images of a part."""
        return np.arange(number * self.size, min((number + 1) * self.size, self.count))

    # -- writing --

    def write(self, number: int, rows: Rows, unreadable: Mapping[str, str]) -> None:
        """Write a part: rows in the order of the images, and why the others are missing."""
        name = self.layout.part(number).name
        record: dict[str, Any] = {"file": name if rows else None, "rows": len(rows), "unreadable": dict(unreadable)}
        record |= {} if self.stamps is None else self.stamps.digests[number]
        if rows:
            write = {"parquet": self._write_parquet, "safetensors": _write_safetensors, "npy": _write_npy}[self.kind]
            record["maps"] = _write_atomically(self.folder / name, lambda path: write(path, rows))
        write_json(self.layout.record(number), record)

    def _write_parquet(self, path: Path, rows: Rows) -> list[Any]:
        import pyarrow as pa
        from pyarrow import parquet

        values = np.stack([value for _, value in rows])
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        table = pa.table({"path": [as_utf8(name) for name, _ in rows], "vector": vectors})
        signed = table.replace_schema_metadata({"adclr": json.dumps(self.facts)} | outputs.signature("embed"))
        parquet.write_table(signed, path, use_dictionary=False, compression="none")  # neither makes it smaller
        return []

    def finish(self, more: Facts) -> dict[str, Any]:
        """Join the parts of a single file, write the description of the embedding and return it."""
        records = [read_json(file) for file in sorted(self.done.glob("*.json"))]
        rows = sum(record["rows"] for record in records)
        unreadable = [
            {"path": as_utf8(path), "reason": reason, "part": number}
            for number, record in enumerate(records)
            for path, reason in record["unreadable"].items()
        ]
        if not rows:
            shutil.rmtree(self.done)  # `open` then deletes the folder
            reason = unreadable[0]["reason"]
            raise UserError(f"none of the {self.count} images can be read, the first for this: {reason}")
        if unreadable:
            _write_lines(self.unreadable, unreadable)
        else:
            self.unreadable.unlink(missing_ok=True)
        parts = [{key: record[key] for key in ("rows", *STAMPS) if key in record} for record in records]
        if self.stamps is not None:  # by content a part may be the same with other times
            parts = [{**part, **digests} for part, digests in zip(parts, self.stamps.digests, strict=True)]
        about = self.facts | {"finished": True, "rows": rows, "unreadable": len(unreadable), "parts": parts}
        about |= {**more, **outputs.signature("embed")}
        if self.kind != "parquet":
            names = ("shard", *MAP_KEYS)
            maps = ([record["file"], *row] for record in records for row in record.get("maps", ()))
            _write_lines(self.layout.index, (dict(zip(names, row, strict=True)) for row in maps))
        files = [self.folder / record["file"] for record in records if record["file"]]
        if self.single:  # if it is killed meanwhile, old rows must not pass for new ones
            write_json(self.layout.about, about | {"finished": False})
            _write_atomically(self.out, lambda path: _join(path, files))
        write_json(self.layout.about, about)
        if self.single:
            shutil.rmtree(self.folder)
        else:
            self._remove_earlier(files)
            shutil.rmtree(self.done, ignore_errors=True)  # a command that finds all finished deletes it too
            (self.folder / ".lock").unlink(missing_ok=True)
        return about

    def _remove_earlier(self, files: Sequence[Path]) -> None:
        """Delete the parts of an earlier embedding that this one does not have."""
        for path in self.folder.iterdir():
            if re.fullmatch(r"part-\d{6}\.(parquet|safetensors|npy)", path.name) and path not in files:
                path.unlink()
        if self.kind == "parquet":
            self.layout.index.unlink(missing_ok=True)


def _write_atomically(path: Path, write: Callable[[Path], Any]) -> Any:
    """Write a temporary file, sync it and rename it; return what `write` returns."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        result = write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written ({error}); fix this, and the same command resumes") from None
    return result


def _write_lines(path: Path, rows: Iterable[Facts]) -> None:
    def write(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    _write_atomically(path, write)


def _write_safetensors(path: Path, rows: Rows) -> list[Any]:
    """Write one tensor, height×width×D, for each image, named by its number in the part."""
    from safetensors.numpy import save_file

    save_file({f"{number:06d}": np.ascontiguousarray(value) for number, (_, value) in enumerate(rows)}, path)
    return [[as_utf8(name), f"{number:06d}", *value.shape[:2]] for number, (name, value) in enumerate(rows)]


def _write_npy(path: Path, rows: Rows) -> list[Any]:
    """Write the patches of all images one after the other; the key of an image is its first row."""
    counts = [value.shape[0] * value.shape[1] for _, value in rows]
    starts = (np.cumsum(counts) - counts).tolist()
    with open(path, "wb") as file:
        np.save(file, np.concatenate([value.reshape(-1, value.shape[-1]) for _, value in rows]), allow_pickle=False)
    return [[as_utf8(name), start, *value.shape[:2]] for start, (name, value) in zip(starts, rows, strict=True)]


def _join(path: Path, files: list[Path]) -> None:
    """Join Parquet files into one, a row group for each, one in memory at a time."""
    from pyarrow import parquet

    with parquet.ParquetWriter(path, parquet.read_schema(files[0]), use_dictionary=False, compression="none") as writer:
        for file in files:
            writer.write_table(parquet.read_table(file))
