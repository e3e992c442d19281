"""Fingerprints of data sets: hashes of names and sizes, the same wherever a data set is. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from adclr.config.parsing import UserError
from adclr.data import file_stamps
from adclr.data.collection import open_source
from adclr.study.study_file import SCENES, Study, data_folder, data_name


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of the data sets whose folders are known; the others are assumed to be unchanged."""

    training: Mapping[str, str] = field(default_factory=dict)  # by the `data` of a run
    evaluations: Mapping[str, str] = field(default_factory=dict)  # by the `data` of an evaluation


def compute_fingerprints(study: Study, folders: Mapping[str, Path]) -> Fingerprints:
    """Return the fingerprints of the data of a study, as far as its folders are known.

    Images to train on are identified by their names and sizes. An evaluation has labels in other files too, so that all
    files of its folder count. The built-in scenes are drawn by the program and have none.
    """

    def is_available(data: str) -> bool:
        return data_name(data) in folders and data_name(data) != SCENES and data_folder(data, folders).is_dir()

    training = {}
    for data in {cell.data for cell in study.cells if not cell.untrained and is_available(cell.data)}:
        with suppress(UserError):  # whatever is wrong with it, the first run reports it
            training[data] = file_stamps.fingerprint_files(open_source(data_folder(data, folders)))
    names = {one.data for one in study.outline.evaluations.values() if one.data is not None and is_available(one.data)}
    return Fingerprints(training, {data: _hash_files(data_folder(data, folders)) for data in names})


def combine_fingerprints(*fingerprints: str) -> str:
    """Return one fingerprint of several data sets."""
    return blake2b(json.dumps(fingerprints).encode(), digest_size=16).hexdigest()


def _hash_files(folder: Path) -> str:
    return blake2b(json.dumps(sorted(_list_files(folder))).encode(), digest_size=16).hexdigest()


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
