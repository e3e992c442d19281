"""The files of an earlier embedding: whether they are one's files, what was embedded, and which parts are still valid.

A part is valid if none of its images has changed since (see `file_stamps`). The other parts are written again; the
valid ones of a single file are extracted from it, a row group each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from adclr.config.parsing import UserError
from adclr.data.file_stamps import Check, Stamps
from adclr.system import outputs
from adclr.system.files import read_json

Format = Literal["parquet", "safetensors", "npy"]
Facts = Mapping[str, Any]
MAP_KEYS = ("path", "key", "height", "width")  # of a row of index.jsonl, beside the file that the map is in
STAMPS = ("time", "content")  # keys of a part in its record
BEGUN = (".lock", ".setup", "_done", "_claims")  # what is there before the description; shared=true has all of them


@dataclass(frozen=True)
class EmbeddingLayout:
    """The names of the files of an embedding."""

    out: Path
    kind: Format

    @property
    def single(self) -> bool:
        """Return whether the embedding is one file."""
        return self.out.suffix == ".parquet"

    @property
    def folder(self) -> Path:
        """Return the folder of the parts."""
        return self.out.with_name(f"{self.out.name}.parts") if self.single else self.out

    @property
    def done(self) -> Path:
        """Return the folder of the records of complete parts."""
        return self.folder / "_done"

    @property
    def started(self) -> Path:
        """Return the description of an embedding that has begun."""
        return self.folder / "_embed.json"

    @property
    def about(self) -> Path:
        """Return the description of an embedding that is finished."""
        return self.out.with_name(f"{self.out.name}.json") if self.single else self.started

    @property
    def unreadable(self) -> Path:
        """Return the list of unreadable images."""
        if self.single:
            return self.out.with_name(f"{self.out.name}.unreadable.jsonl")
        return self.out / "_unreadable.jsonl"

    @property
    def index(self) -> Path:
        """Return the list of patch maps."""
        return self.folder / "index.jsonl"

    def part(self, number: int) -> Path:
        """Return the file of a part."""
        return self.folder / f"part-{number:06d}.{self.kind}"

    def record(self, number: int) -> Path:
        """Return the record of a complete part."""
        return self.done / f"{number:06d}.json"


@dataclass(frozen=True)
class PartStamps:
    """The stamps of the images of each part, as they are now."""

    digests: Sequence[Mapping[str, str]]
    newest: Sequence[int]  # when the last image was modified, ns
    check: Check

    @staticmethod
    def of(stamps: Stamps, size: int, check: Check) -> PartStamps:
        """Return the stamps of parts of so many images."""
        parts = [stamps.of(np.arange(i, min(i + size, len(stamps)))) for i in range(0, len(stamps), size)]
        return PartStamps([p.digests() for p in parts], [int(p.times.max(initial=0)) for p in parts], check)

    def unchanged(self, number: int, stored: Facts, written_ns: int) -> bool:
        """Return whether the images of a part are those of its record; version 0.1 stored only the time."""
        if "time" not in stored:
            return self.newest[number] <= written_ns
        return bool(stored.get(self.check) == self.digests[number][self.check])


def check_files(layout: EmbeddingLayout, overwrite: bool) -> None:
    """Refuse files that no embedding has written, where this one would write."""
    folder = layout.folder
    temporary = f".{layout.started.name}.*.tmp"  # the description while it is written
    names = list(folder.iterdir()) if folder.is_dir() else []
    others = [path for path in names if path.name not in BEGUN and not path.match(temporary)]
    # looked for after the names: of several workers the first writes it before there are parts
    is_embedding = not others or (layout.started.exists() and _is_description(layout.started))
    if not is_embedding and (layout.single or not overwrite):  # the folder of a single file is deleted in the end
        remedy = "choose another --out or remove it" if overwrite else outputs.REMEDY
        raise UserError(f"{folder} was not written by adclr embed; {remedy}")
    if layout.single and not overwrite:
        checks = {layout.out: _is_parquet, layout.about: _is_description, layout.unreadable: _is_unreadable}
        for path, is_ours in checks.items():
            if os.path.lexists(path) and not is_ours(path):
                raise UserError(f"{path} was not written by adclr embed; {outputs.REMEDY}")


def _is_description(path: Path) -> bool:
    """Return whether a file describes an embedding; in version 0.1 it had no signature."""
    try:
        value = read_json(path)
    except UserError:
        return False
    return isinstance(value, dict) and {"finished", "weights"} <= set(value)


def _is_parquet(path: Path) -> bool:
    from pyarrow import ArrowException, parquet

    try:
        return b"adclr" in (parquet.read_schema(path).metadata or {})
    except (ArrowException, OSError):
        return False


def _is_unreadable(path: Path) -> bool:
    try:
        return all(set(row) >= {"path", "reason"} for row in _read_lines(path))
    except (ValueError, TypeError):
        return False


def difference(file: Path, facts: Facts) -> str | None:
    """Return how the description in a file differs from these facts, in words; None if it does not."""
    if not _is_description(file):
        return f"settings that cannot be read, because {file.name} is damaged"
    about = read_json(file)
    about.setdefault("normalize", about.get("normalise"))  # its name in version 0.1
    for name, value in facts.items():
        if about.get(name) != value:
            is_hash = name in ("weights", "images")
            return f"other {name}" if is_hash else f"{name}={about.get(name)} where {value} was asked for"
    return None


def finished(layout: EmbeddingLayout, facts: Facts, overwrite: bool) -> dict[str, Any] | None:
    """Return the description of the same embedding if it is finished, else None; refuse another one."""
    if not layout.about.exists() or (layout.single and not layout.out.exists()):
        return None
    other = difference(layout.about, facts)
    if other is not None:
        if overwrite:
            return None
        raise UserError(f"{layout.out} was made with {other}; {outputs.REMEDY}")
    about: dict[str, Any] = read_json(layout.about)
    return about if about.get("finished") else None


def changed(layout: EmbeddingLayout, about: Facts, now: PartStamps) -> list[int]:
    """Return the parts of a finished embedding whose images have changed since, or whose files are gone."""
    parts, written = about.get("parts"), layout.about.stat().st_mtime_ns
    if parts is None:  # of version 0.1, whose parts cannot be told apart
        return list(range(len(now.newest))) if max(now.newest, default=0) > written else []
    return [
        number
        for number, part in enumerate(parts)
        if not now.unchanged(number, part, written)
        or not (layout.single or not part["rows"] or layout.part(number).exists())
    ]


def valid_parts(
    layout: EmbeddingLayout, about: Facts, changed: Sequence[int]
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (number, row group in the single file, record) of the unchanged parts of a finished embedding."""
    parts = about.get("parts")
    if parts is None:
        return
    unreadable: dict[int, dict[str, str]] = {}
    for row in _read_lines(layout.unreadable):
        unreadable.setdefault(row.get("part", -1), {})[row["path"]] = row["reason"]
    maps: dict[str, list[Any]] = {}
    for row in _read_lines(layout.index):
        maps.setdefault(row["shard"], []).append([row[key] for key in MAP_KEYS])
    group = -1
    for number, part in enumerate(parts):
        name = layout.part(number).name if part["rows"] else None
        group += bool(part["rows"])  # a part without rows has no group
        if number not in changed:
            record = {"file": name, "rows": part["rows"], "unreadable": unreadable.get(number, {})}
            record |= {key: part[key] for key in STAMPS if key in part}
            yield number, group, record | ({"maps": maps.get(name, [])} if name else {})


def extract_group(path: Path, source: Path, group: int) -> None:
    """Write a row group of a Parquet file as a separate file."""
    from pyarrow import parquet

    with parquet.ParquetFile(source) as file:
        parquet.write_table(file.read_row_group(group), path, use_dictionary=False, compression="none")


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .jsonl file; none if there is no file."""
    if path.exists():
        with open(path, encoding="utf-8") as file:
            yield from map(json.loads, file)
