"""The studies that come with the program, and how a name or path becomes a file. Imports no torch."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import adclr
from adclr.config.parsing import UserError
from adclr.study.study_file import read_study

PACKAGE = Path(adclr.__file__).parent
FOLDERS = (PACKAGE / "studies", PACKAGE.parents[1] / "studies")  # of an installed package, of a copy of the repository


def shipped_studies() -> dict[str, Path]:
    """Return the files of all shipped studies by name, sorted."""
    folder = next((folder for folder in FOLDERS if any(folder.glob("*.yaml"))), None)
    return {} if folder is None else {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def find_study(name: str) -> Path:
    """Return the file of a study: a path, or the name of one that is shipped."""
    path, studies = Path(name), shipped_studies()
    if path.exists() or os.sep in name or path.suffix:
        return path
    if name not in studies:
        near = difflib.get_close_matches(name, studies, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else "adclr study --list shows those that are shipped"
        raise UserError(f"there is no study '{name}'; {hint}")
    return studies[name]


def find_small(file: Path) -> Path:
    """Return the file of the small variant of a study, which lies beside it."""
    small = read_study(file).outline.small
    if small is None:
        raise UserError(f"study {file} names no small variant; leave out --small")
    return file.with_name(f"{small}.yaml")
