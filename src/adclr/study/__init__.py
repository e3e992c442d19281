"""Grids of runs and their scores: what is missing is run, then one table and one figure."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adclr import scenes
from adclr.config import UserError
from adclr.runs import check_writable, write_atomically, write_json
from adclr.study import figure, table
from adclr.study.conduct import Place, carry_out, gpus
from adclr.study.outline import SCENES, Study, read
from adclr.study.results import Results

NUM_PIXELS = 200, 100  # scenes with labelled pixels, to learn from and to score


def run(
    file: Path,
    out: Path,
    results: Path | None,
    data: Mapping[str, Any],
    minutes: float | None = None,
    at_once: int = 1,  # on each GPU
) -> Path:
    """Runs what is missing and can be run, and writes the page; without data it is remade of what is there."""
    study = read(file)
    kept = Results(results if results is not None else file.parent / "results")
    check_writable(kept.folder)
    missing = [cell for cell in study.cells if not kept.complete(study, cell)]
    print(f"{study.outline.title}: {len(study.cells)} runs, {len(study.cells) - len(missing)} of them done", flush=True)
    folders = _folders(study, data)
    unknown = sorted(study.data_names() - set(folders) - {SCENES})
    left = missing
    if missing and unknown:
        words = " ".join(f"{name}=DIR" for name in unknown)
        print(f"{len(missing)} runs are missing; say where the data lies to make them: {words}")
    elif missing:
        check_writable(out)
        if SCENES in study.data_names():
            folders[SCENES] = _scenes(out / SCENES)
        place = Place(out, folders, gpus() * at_once)
        left = carry_out(study, missing, kept, place, minutes if minutes is not None else study.outline.minutes)
        if left:
            print(f"{len(left)} runs were not begun, since the time was up; the same command goes on with them")
    return _write(study, kept)


def _folders(study: Study, data: Mapping[str, Any]) -> dict[str, Path]:
    found = {}
    for name, place in data.items():
        if name not in study.data_names():
            raise UserError(
                f"{study.file} uses no data called '{name}'; it uses: {', '.join(sorted(study.data_names()))}"
            )
        found[name] = Path(str(place)).absolute()
        if not found[name].is_dir():
            raise UserError(f"folder {place} of {name} does not exist; check the path")
    return found


def _scenes(folder: Path) -> Path:
    """Renders the built-in scenes where they are not there yet: kinds/, those of the demo, and pixels/, others."""
    if not folder.exists():
        half = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(half, ignore_errors=True)
        scenes.write(half / "kinds", 0, scenes.NUM_TRAIN, scenes.NUM_VAL)
        scenes.write_pixels(half / "pixels", 0, scenes.NUM_TRAIN + scenes.NUM_VAL, *NUM_PIXELS)
        os.rename(half, folder)
    return folder


def _write(study: Study, kept: Results) -> Path:
    stem = study.file.stem
    rows = table.collect(study, kept)
    drawn = figure.draw(study, rows)
    if drawn is not None:
        write_atomically(kept.folder / f"{stem}.svg", drawn.encode())
    text = table.page(study, kept, rows, f"{stem}.svg" if drawn is not None else None)
    write_atomically(kept.folder / f"{stem}.md", text.encode())
    write_json(kept.folder / f"{stem}.json", table.numbers(rows, study.outline.control))
    print(f"\n{text}\nwritten to {kept.folder / f'{stem}.md'}")
    return kept.folder / f"{stem}.md"
