"""Which data results are of: hashes of names and sizes, the same wherever a data set lies. Knows nothing of torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from adclr.config.sections import UserError
from adclr.data import stamps
from adclr.data.collection import open_source
from adclr.study.outline import SCENES, Study, folder_of, name_of


@dataclass(frozen=True)
class Fingerprints:
    """Of the data sets whose folders were named; the others are taken to be what they were."""

    training: str | None = None
    evaluations: Mapping[str, str] = field(default_factory=dict)  # by what an evaluation calls its data


def take(study: Study, folders: Mapping[str, Path]) -> Fingerprints:
    """Returns the fingerprints of the data of a study, as far as it is there.

    Images to train on are known by their names and sizes. An evaluation has labels in other files too, so that all
    files of its folder count. The built-in scenes are drawn by the program and have none.
    """

    def at_hand(place: str) -> bool:
        return name_of(place) in folders and name_of(place) != SCENES and folder_of(place, folders).is_dir()

    training = None
    if at_hand(study.outline.data) and not all(cell.untrained for cell in study.cells):
        try:
            training = stamps.fingerprint(open_source(folder_of(study.outline.data, folders)))
        except UserError:  # whatever is wrong with it, the first run says it
            training = None
    places = {one.data for one in study.outline.evaluations.values() if one.data is not None}
    return Fingerprints(training, {place: _of_files(folder_of(place, folders)) for place in places if at_hand(place)})


def _of_files(folder: Path) -> str:
    return blake2b(json.dumps(sorted(_files(folder))).encode(), digest_size=16).hexdigest()


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """(path below the folder, bytes) of all files but hidden ones; what two links lead to counts once."""
    entered: set[tuple[int, int]] = set()
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        status = here.stat()
        if (status.st_dev, status.st_ino) in entered:
            continue
        entered.add((status.st_dev, status.st_ino))
        with os.scandir(here) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    waiting.append(Path(entry.path))
                elif entry.is_file():
                    yield Path(entry.path).relative_to(folder).as_posix(), entry.stat().st_size
