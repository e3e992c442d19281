"""Grids of runs and their scores: what is missing is run, then one table and one figure."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adclr.config.sections import UserError
from adclr.data.sets import scenes
from adclr.study import data as fingerprints
from adclr.study import figure, table
from adclr.study.conduct import Place, carry_out, gpus, todo
from adclr.study.outline import SCENES, Cell, Study, folder_of, name_of, read
from adclr.study.results import Results
from adclr.system import outputs
from adclr.system.files import check_writable, write_atomically, write_json
from adclr.system.text import printable, printable_lines

NUM_PIXELS = 200, 100  # scenes with labelled pixels, to learn from and to score


def run(
    file: Path,
    out: Path,
    results: Path | None,
    data: Mapping[str, Any],
    minutes: float | None = None,
    at_once: int = 1,  # on each GPU
    overwrite: bool = False,  # pages of the same name that no study wrote
) -> Path:
    """Runs what is missing and has its data at hand, and writes the page; without data of what is there already."""
    study = read(file)
    folders = _folders(study, data)
    kept = Results(results if results is not None else file.parent / "results", fingerprints.take(study, folders))
    check_writable(kept.folder)
    page, *others = (kept.folder / f"{study.file.stem}{ending}" for ending in (".md", ".json", ".svg"))
    remedy = "choose another --results, or say --overwrite to replace it"
    outputs.check("study", [page, *others], overwrite, record=page, remedy=remedy)
    missing = [cell for cell in study.cells if not kept.complete(study, cell)]
    title, done = printable(study.outline.title), len(study.cells) - len(missing)
    print(f"{title}: {len(study.cells)} runs, {done} of them done", flush=True)
    _say_what_is_of_other_data(study, kept, folders)
    place = Place(out, folders, ())
    possible = [cell for cell in missing if todo(study, cell, kept, place) is not None]
    if missing:
        _say_what_is_left_out(study, kept, missing, possible, folders)
    if possible:
        check_writable(out)
        if SCENES in study.data_names():
            folders[SCENES] = _scenes(out / SCENES)
        again = sum(
            not cell.untrained and kept.of(cell) is not None and not place.has_weights(cell, kept) for cell in possible
        )
        if again:
            print(f"{again} runs are trained again to be scored, since their weights are not in {out}", flush=True)
        place = Place(out, folders, gpus() * at_once)
        left = carry_out(study, possible, kept, place, minutes if minutes is not None else study.outline.minutes)
        if left:
            print(f"{len(left)} runs were not begun, since the time was up; the same command goes on with them")
    return _write(study, kept)


def _folders(study: Study, data: Mapping[str, Any]) -> dict[str, Path]:
    """Where data lies; of a list that serves several studies, what this one uses."""
    found = {SCENES: Path()} if SCENES in study.data_names() else {}  # rendered when it is known that they are needed
    unused = []
    for name, said in data.items():
        place = Path(str(said)).absolute()
        if name in study.data_names():
            if not place.is_dir():
                raise UserError(f"folder {said} of {name} does not exist; check the path")
            found[name] = place
        elif place.is_dir():
            unused.append(name)
        else:
            raise UserError(
                f"{study.file} uses no data called '{name}'; it uses: {', '.join(sorted(study.data_names()))}"
            )
    if unused:
        print(f"not used by this study: {', '.join(unused)}")
    return found


def _say_what_is_of_other_data(study: Study, kept: Results, folders: Mapping[str, Path]) -> None:
    """Which results are not taken, since they were made with other data that has the same name."""
    count = kept.of_other_data(study.cells)
    if count:
        folder = folder_of(study.outline.data, folders)
        print(f"{count} runs here were trained on other images than those of {folder}; they are not taken", flush=True)
    for title, one in study.outline.evaluations.items():
        count = kept.scores_of_other_data(study.cells, one)
        if count and one.data is not None:
            folder = folder_of(one.data, folders)
            print(f"{printable(title)}: {count} scores here are of other data than {folder}; they are not taken")
    several = kept.on_several_data(study.cells) if name_of(study.outline.data) not in folders else 0
    if several:
        name = name_of(study.outline.data)
        print(f"{several} runs were made on several data sets called {name}; without {name}=DIR the first is taken")


def _say_what_is_left_out(
    study: Study, kept: Results, missing: Sequence[Cell], possible: Sequence[Cell], folders: Mapping[str, Path]
) -> None:
    """Which runs or scores must wait, since their data is not at hand."""
    words = " ".join(f"{name}=DIR" for name in sorted(study.data_names() - set(folders)))
    if len(possible) < len(missing):
        print(f"{len(missing) - len(possible)} runs are missing; say where the data lies to make them: {words}")
    unscored = {one.key for cell in possible for one in kept.missing(cell, study.outline.evaluations)}
    columns = [
        title
        for title, one in study.outline.evaluations.items()
        if one.key in unscored and one.data is not None and name_of(one.data) not in folders
    ]
    if columns:
        print(f"left out, since it was not said where their data lies ({words}): {', '.join(columns)}", flush=True)


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
    drawn = figure.draw_figure(study, rows)
    if drawn is not None:
        write_atomically(kept.folder / f"{stem}.svg", drawn.encode())
    text = table.page(study, kept, rows, f"{stem}.svg" if drawn is not None else None)
    write_atomically(kept.folder / f"{stem}.md", text.encode())
    write_json(kept.folder / f"{stem}.json", table.numbers(rows, study.outline.control))
    print(f"\n{printable_lines(text)}\nwritten to {kept.folder / f'{stem}.md'}")
    return kept.folder / f"{stem}.md"
