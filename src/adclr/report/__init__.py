"""`adclr report`: one page about a run, or about several, that needs no network and nothing beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from adclr.config.sections import UserError
from adclr.report import story
from adclr.report.page import render
from adclr.system import outputs
from adclr.system.files import check_writable, write_atomically

FILE = "report.html"


def run(runs: Sequence[str], out: Path | None, overwrite: bool = False) -> Path:
    """Writes the page: beside a single run, or where it is asked for."""
    if out is None:
        if len(runs) > 1:
            raise UserError("a report of several runs belongs to none of them; say where it goes with --out FILE")
        out = Path(runs[0]) / FILE
    check_writable(out)
    outputs.check("report", [out], overwrite)
    stories = [story.read(path) for path in runs]
    write_atomically(out, render(_named_apart(stories)).encode(errors="backslashreplace"), durable=False)
    return out


def _named_apart(stories: list[story.Story]) -> list[story.Story]:
    """Runs whose folders have the same name are told apart by their whole paths."""
    names = [one.name for one in stories]
    if len(set(names)) == len(names):
        return stories
    return [replace(one, name=str(one.path)) for one in stories]
