"""Reports on runs: `adclr report` writes one self-contained HTML page on one or several runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from adclr.config.parsing import UserError
from adclr.data.collection import describe_inside
from adclr.report.page import render_page
from adclr.report.record import read_record
from adclr.system import outputs
from adclr.system.files import check_writable, write_atomically
from adclr.system.outputs import is_searched
from adclr.system.runs import Run

FILE = "report.html"


def write_report(runs: Sequence[str], out: Path | None, overwrite: bool = False) -> Path:
    """Write the page and return its path: `out`, by default report.html in the directory of a single run."""
    is_chosen = out is not None
    if out is None:
        if len(runs) > 1:
            raise UserError("a report of several runs belongs to none of them; say where it goes with --out FILE")
        out = Path(runs[0]) / FILE
    check_writable(out)
    outputs.check_overwrite("report", [out], overwrite)
    records = [read_record(path) for path in runs]
    for record in records if is_chosen else ():
        data = record.settings.get("data.path")
        if isinstance(data, str) and os.path.isdir(data) and is_searched(out.parent, [data]):
            raise UserError(describe_inside(out, data))
    if len({record.name for record in records}) < len(records):  # tell them apart by their paths
        records = [replace(record, name=str(record.path)) for record in records]
    write_atomically(out, render_page(records).encode(errors="backslashreplace"), durable=False)
    return out


def refresh_report(scores: Path) -> None:
    """Write the page of a finished run anew after an evaluation, if its scores are in the run and the page is ours."""
    run, is_main = Path(*scores.parts[:-3]), os.environ.get("RANK", "0") == "0"
    is_ours = scores.parts[-3:-2] == ("evals",) and outputs.read_author(run / FILE) == "report"
    if not (is_main and is_ours and Run(run).finished):
        return
    with suppress(UserError, OSError):  # the scores are what was asked for
        write_report([str(run)], None)
