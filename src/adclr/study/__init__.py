"""Studies: grids of runs and their scores; `adclr study` runs what is missing and writes one table and one figure."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adclr.config.parsing import UserError
from adclr.data.collection import describe_inside
from adclr.data.sets import scenes
from adclr.study import figure, table
from adclr.study.fingerprints import compute_fingerprints
from adclr.study.results import Results
from adclr.study.runner import Workspace, list_gpus, pending_evaluations, run_cells
from adclr.study.study_file import SCENES, Cell, Study, data_folder, data_name, read_study
from adclr.system import outputs
from adclr.system.files import check_writable, write_atomically, write_json
from adclr.system.outputs import is_searched
from adclr.system.text import printable, printable_lines

NUM_TRAIN_PIXELS, NUM_VAL_PIXELS = 200, 100  # scenes with labeled pixels


def run_study(
    file: Path,
    out: Path,
    results: Path | None,
    data: Mapping[str, Any],
    minutes: float | None = None,
    at_once: int = 1,  # on each GPU
    overwrite: bool = False,  # pages of the same name that no study wrote
) -> Path:
    """Run what is missing and has its data here, write the page on all results, and return its path."""
    study = read_study(file)
    folders = _check_folders(study, data)
    store = Results(results if results is not None else file.parent / "results", compute_fingerprints(study, folders))
    for folder in (folders[name] for name in sorted(folders) if name != SCENES):
        for path, option in ((store.folder, "--results"), (out, "--out")):
            if is_searched(path, [folder]):
                raise UserError(describe_inside(path, folder, option))
    check_writable(store.folder)
    page, *others = (store.folder / f"{study.file.stem}{ending}" for ending in (".md", ".json", ".svg"))
    remedy = "choose another --results, or say --overwrite to replace it"
    outputs.check_overwrite("study", [page, *others], overwrite, record=page, remedy=remedy)
    missing = [cell for cell in study.cells if not store.is_complete(study, cell)]
    title, done = printable(study.outline.title), len(study.cells) - len(missing)
    print(f"{title}: {len(study.cells)} runs, {done} of them done", flush=True)
    _report_other_data(study, store, folders)
    workspace = Workspace(out, folders, ())
    possible = [cell for cell in missing if pending_evaluations(study, cell, store, workspace) is not None]
    if missing:
        _report_missing_data(study, store, missing, possible, folders)
    if possible:
        check_writable(out)
        if SCENES in study.data_names():
            folders[SCENES] = _render_scenes(out / SCENES)
        retrained = [
            cell
            for cell in possible
            if not cell.untrained and store.read(cell) is not None and not workspace.has_weights(cell, store)
        ]
        if retrained:
            count = len(retrained)
            print(
                printable(f"{count} runs are trained again to be scored, since their weights are not in {out}"),
                flush=True,
            )
        workspace = Workspace(out, folders, list_gpus() * at_once)
        left = run_cells(study, possible, store, workspace, minutes if minutes is not None else study.outline.minutes)
        if left:
            print(f"{len(left)} runs were not begun, since the time was up; the same command goes on with them")
    return _write_page(study, store)


def _check_folders(study: Study, data: Mapping[str, Any]) -> dict[str, Path]:
    """Return the folders of the data sets of a study; `data` may name those of other studies too."""
    folders = {SCENES: Path()} if SCENES in study.data_names() else {}  # rendered when they are needed
    unused = []
    for name, value in data.items():
        folder = Path(str(value)).absolute()
        if name in study.data_names():
            if not folder.is_dir():
                raise UserError(f"folder {value} of {name} does not exist; check the path")
            folders[name] = folder
        elif folder.is_dir():
            unused.append(name)
        else:
            raise UserError(
                f"{study.file} uses no data called '{name}'; it uses: {', '.join(sorted(study.data_names()))}"
            )
    if unused:
        print(f"not used by this study: {', '.join(unused)}")
    return folders


def _report_other_data(study: Study, store: Results, folders: Mapping[str, Path]) -> None:
    """Print which results are not used, since they are of other data with the same name."""
    data = study.outline.data
    count = store.count_other_data(study.cells)
    if count:
        folder = data_folder(data, folders)
        sentence = f"{count} runs here were trained on other images than those of {folder}; they are not taken"
        print(printable(sentence), flush=True)
    for title, one in study.outline.evaluations.items():
        count = store.count_scores_of_other_data(study.cells, one)
        if count and one.data is not None:
            folder = data_folder(one.data, folders)
            print(printable(f"{title}: {count} scores here are of other data than {folder}; they are not taken"))
    name = data_name(data)
    count = 0 if name in folders else store.count_several_data(study.cells)
    if count:
        print(f"{count} runs were made on several data sets called {name}; without {name}=DIR the first is taken")


def _report_missing_data(
    study: Study, store: Results, missing: Sequence[Cell], possible: Sequence[Cell], folders: Mapping[str, Path]
) -> None:
    """Print which runs or scores must wait, since their data is not here."""
    arguments = " ".join(f"{name}=DIR" for name in sorted(study.data_names() - set(folders)))
    if len(possible) < len(missing):
        sentence = f"{len(missing) - len(possible)} runs are missing; say where the data lies to make them: {arguments}"
        print(printable(sentence))
    unscored = {one.key for cell in possible for one in store.missing_evaluations(cell, study.outline.evaluations)}
    columns = [
        title
        for title, one in study.outline.evaluations.items()
        if one.key in unscored and one.data is not None and data_name(one.data) not in folders
    ]
    if columns:
        sentence = f"left out, since it was not said where their data lies ({arguments}): {', '.join(columns)}"
        print(printable(sentence), flush=True)


def _render_scenes(folder: Path) -> Path:
    """Render the built-in scenes unless they exist: kinds/, those of the demo, and pixels/, others."""
    if not folder.exists():
        partial = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        scenes.write_scenes(partial / "kinds", 0, scenes.NUM_TRAIN, scenes.NUM_VAL)
        first = scenes.NUM_TRAIN + scenes.NUM_VAL
        scenes.write_pixels(partial / "pixels", 0, first, NUM_TRAIN_PIXELS, NUM_VAL_PIXELS)
        os.rename(partial, folder)
    return folder


def _write_page(study: Study, store: Results) -> Path:
    stem = study.file.stem
    page = store.folder / f"{stem}.md"
    rows = table.collect_rows(study, store)
    svg = figure.draw_figure(study, rows)
    if svg is not None:
        write_atomically(store.folder / f"{stem}.svg", svg.encode())
    text = table.render_page(study, store, rows, f"{stem}.svg" if svg is not None else None)
    write_atomically(page, text.encode())
    write_json(store.folder / f"{stem}.json", table.summarize(rows, study.outline.control))
    print(f"\n{printable_lines(text)}\nwritten to {page}")
    return page
