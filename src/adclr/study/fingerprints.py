"""Fingerprints of data sets, the same wherever a data set is: NAMES.CONTENTS. Imports no torch.

NAMES is a hash of the names and sizes of all files. CONTENTS is one of what files of labels hold, and of the beginnings
of a few of the others: uncompressed images of one size have files of one size, and a label can be corrected to another
of as many letters. Fingerprints of results made before CONTENTS was added are NAMES alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np

from adclr.config.parsing import UserError
from adclr.data import file_stamps
from adclr.data.collection import open_source
from adclr.data.sources import Source
from adclr.study.study_file import SCENES, Study, data_folder, data_name

SAMPLE, BEGINNING = 256, 2**18  # files whose contents count, and their bytes
LABEL_FILES = (".txt", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".mat", ".cls")
MAX_LABEL_BYTES = 2**26  # beyond, only the beginning counts


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of the data sets whose folders are known; the others are assumed to be unchanged."""

    training: str | None = None
    evaluations: Mapping[str, str] = field(default_factory=dict)  # by the `data` of an evaluation


def compute_fingerprints(study: Study, folders: Mapping[str, Path]) -> Fingerprints:
    """Return the fingerprints of the data of a study, as far as its folders are known.

    Of a training the images count. An evaluation has labels in other files too, so that all files of its folder count.
    The built-in scenes are drawn by the program and have none.
    """

    def is_available(data: str) -> bool:
        return data_name(data) in folders and data_name(data) != SCENES and data_folder(data, folders).is_dir()

    training = None
    if is_available(study.outline.data) and not all(cell.untrained for cell in study.cells):
        try:
            training = _fingerprint_images(open_source(data_folder(study.outline.data, folders)))
        except UserError:  # whatever is wrong with it, the first run reports it
            training = None
    names = {one.data for one in study.outline.evaluations.values() if one.data is not None and is_available(one.data)}
    return Fingerprints(training, {data: _fingerprint_folder(data_folder(data, folders)) for data in names})


def is_same(one: str, other: str) -> bool:
    """Return whether two fingerprints are of the same data, as far as both say."""
    (names, _, contents), (other_names, _, other_contents) = one.partition("."), other.partition(".")
    return names == other_names and (not contents or not other_contents or contents == other_contents)


def shorten(fingerprint: str) -> str:
    """Return eight letters that stand for a fingerprint in names of files."""
    names, _, contents = fingerprint.partition(".")
    return names[:4] + contents[:4] if contents else names[:8]


def _fingerprint_images(source: Source) -> str:
    order = np.argsort(source.keys, kind="stable")
    contents = (_read_item(source, int(order[place])) for place in _spread(len(order)))
    return f"{file_stamps.fingerprint_files(source)}.{_hash(contents)}"


def _read_item(source: Source, index: int) -> bytes:
    try:
        return source.read(index)[:BEGINNING]
    except OSError:
        return b""


def _fingerprint_folder(folder: Path) -> str:
    files = sorted(_list_files(folder))
    is_label = [name.lower().endswith(LABEL_FILES) and size <= MAX_LABEL_BYTES for name, size in files]
    labels = [name for (name, _), is_one in zip(files, is_label, strict=True) if is_one]
    others = [name for (name, _), is_one in zip(files, is_label, strict=True) if not is_one]
    contents = chain(
        (_read_beginning(folder / name, MAX_LABEL_BYTES) for name in labels),
        (_read_beginning(folder / others[place], BEGINNING) for place in _spread(len(others))),
    )
    return f"{_hash([json.dumps(files).encode()])}.{_hash(contents)}"


def _read_beginning(file: Path, length: int) -> bytes:
    try:
        with open(file, "rb") as opened:
            return opened.read(length)
    except OSError:
        return b""


def _spread(count: int) -> list[int]:
    """Return up to `SAMPLE` positions spread over so many files."""
    positions: list[int] = np.linspace(0, count - 1, min(SAMPLE, count)).round().astype(int).tolist()
    return positions


def _hash(contents: Iterable[bytes]) -> str:
    """Return a hash of several contents; of one, that of its bytes."""
    digest = blake2b(digest_size=16)
    for number, content in enumerate(contents):
        digest.update((b"" if not number else len(content).to_bytes(8, "big")) + content)
    return digest.hexdigest()


def _list_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield (path below the folder, bytes) of all files but hidden ones; a folder with two links to it counts once."""
    visited: set[tuple[int, int]] = set()
    waiting = [folder]
    while waiting:
        current = waiting.pop()
        status = current.stat()
        if (status.st_dev, status.st_ino) in visited:
            continue
        visited.add((status.st_dev, status.st_ino))
        with os.scandir(current) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    waiting.append(Path(entry.path))
                elif entry.is_file():
                    yield Path(entry.path).relative_to(folder).as_posix(), entry.stat().st_size
