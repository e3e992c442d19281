"""Studies: grids of runs and their scores; `adclr study` runs what is missing and writes one table and one figure."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adclr.config.parsing import UserError
from adclr.data.collection import describe_inside
from adclr.data.sets import scenes
from adclr.study import figure, overview, shipped, table
from adclr.study.fingerprints import compute_fingerprints
from adclr.study.jobs import Workspace, in_rounds, pending_evaluations, pending_pictures, select_runs, with_sources
from adclr.study.results import Results
from adclr.study.runner import list_gpus, run_cells
from adclr.study.slurm import run_cells_in_slurm
from adclr.study.slurm_queue import split_options
from adclr.study.study_file import SCENES, Cell, Study, data_folder, data_name, read_study
from adclr.system import outputs
from adclr.system.files import check_writable, write_atomically, write_json
from adclr.system.outputs import is_searched
from adclr.system.store_urls import conceal, is_remote
from adclr.system.stores.local_copy import local_folder
from adclr.system.text import printable, printable_lines
from adclr.training import plan_gpus

DEFAULT_GPU = "h200"  # of estimates
NUM_TRAIN_PIXELS, NUM_VAL_PIXELS = 200, 100  # scenes with labeled pixels


def run_command(options: Namespace, data: Mapping[str, Any]) -> None:
    """Run `adclr study`: list the shipped studies, say what one would run, or run it."""
    gpu = plan_gpus.find_gpu(options.gpu or DEFAULT_GPU, None, None)
    assert gpu is not None
    results = Path(options.results) if options.results else None
    if options.list:
        print(overview.list_studies(gpu, results))
        return
    if not options.file:
        options.parser.error("no study was named; adclr study --list shows those that are shipped")
    file = Path(options.file)
    if options.small:
        file = overview.find_small(file)
    if options.dry_run:
        print(overview.describe_study(overview.inspect_study(file, gpu, results, options.only), gpu, file))
        return
    limits = options.minutes, options.at_once
    launcher = options.launcher, options.slurm
    run_study(file, Path(options.out), results, data, *limits, options.overwrite, *launcher, options.only)


def run_study(
    file: Path,
    out: Path,
    results: Path | None,
    data: Mapping[str, Any],
    minutes: float | None = None,
    at_once: int | None = None,  # on each GPU, by default 1; in SLURM in all, by default as many as it starts
    overwrite: bool = False,  # pages of the same name that no study wrote
    launcher: str = "local",  # or "slurm"
    slurm: str = "",  # options of sbatch
    only: Sequence[str] = (),  # words in the names of the runs to make; without any, all are made
) -> Path:
    """Run what is missing and has its data here, write the page on all results, and return its path."""
    _check_launcher(launcher, slurm, minutes)
    file, is_shipped = shipped.find_study(file)
    study = read_study(file)
    folders = _check_folders(study, data, launcher)
    if results is None:
        results = shipped.WORKING_RESULTS if is_shipped else file.parent / "results"
    store = Results(results, compute_fingerprints(study, folders))
    for folder in (folders[name] for name in sorted(folders) if name != SCENES):
        for path, option in ((store.folder, "--results"), (out, "--out")):
            if is_searched(path, [folder]):
                raise UserError(describe_inside(path, folder, option))
    check_writable(store.folder)
    if is_shipped:
        shipped.copy_results(study, store)
    page, *others = (store.folder / f"{study.file.stem}{ending}" for ending in (".md", ".json", ".svg"))
    remedy = "choose another --results, or add --overwrite to replace it"
    outputs.check_overwrite("study", [page, *others], overwrite, record=page, remedy=remedy)
    selected = select_runs(study.cells, only)
    missing = [cell for cell in study.cells if not store.is_complete(study, cell)]
    title, done = printable(study.outline.title), len(study.cells) - len(missing)
    print(f"{title}: {len(study.cells)} runs, {done} of them done", flush=True)
    _report_other_data(study, store, folders)
    workspace = Workspace(out, folders)
    missing = [cell for cell in missing if cell in selected]
    possible = [cell for cell in missing if pending_evaluations(study, cell, store, workspace) is not None]
    if missing:
        _report_missing_data(study, store, missing, possible, folders)
    possible += [cell for cell in selected if cell not in possible and pending_pictures(study, cell, store, workspace)]
    if possible:
        check_writable(out)
        if SCENES in study.data_names():
            folders[SCENES] = _render_scenes(out / SCENES)
        possible = with_sources(possible, store, workspace)
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
        if launcher == "slurm":
            for cells in in_rounds(possible):
                run_cells_in_slurm(study, cells, store, workspace, slurm, at_once)
        else:
            workspace = Workspace(out, folders, list_gpus() * (at_once or 1))
            limit = minutes if minutes is not None else study.outline.minutes
            left = run_cells(study, possible, store, workspace, limit)
            if left:
                print(f"{len(left)} runs were not begun, since the time was up; the same command makes them")
    return _write_page(study, store)


def _check_launcher(launcher: str, slurm: str, minutes: float | None) -> None:
    """Refuse options that the launcher does not have."""
    if launcher != "slurm" and slurm:
        raise UserError("--slurm has options for SLURM; add --launcher slurm, or leave it out")
    split_options(slurm)
    if launcher == "slurm" and minutes is not None:
        raise UserError('--minutes is for runs on this machine; limit those in SLURM by --slurm "--time=4:00:00"')


def _check_folders(study: Study, data: Mapping[str, Any], launcher: str) -> dict[str, Path]:
    """Return the folders of the data sets of a study; `data` may name those of other studies too.

    Those in a store are copied to the local cache.
    """
    folders = {SCENES: Path()} if SCENES in study.data_names() else {}  # rendered when they are needed
    unused = []
    for name, value in data.items():
        url = conceal(str(value)) if is_remote(str(value)) else None
        if url is not None and launcher == "slurm":
            raise UserError(f"{name}={url} is in a store; copy it to a disk that all machines of the cluster share")
        if url is not None and name in study.data_names():
            folders[name] = local_folder(url)
            continue
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
    for data in study.training_data:
        cells = [cell for cell in study.cells if cell.data == data]
        count = store.count_other_data(cells)
        if count:
            folder = data_folder(data, folders)
            sentence = f"{count} runs here were trained on other images than those of {folder}; they are not taken"
            print(printable(sentence), flush=True)
        name = data_name(data)
        count = 0 if name in folders else store.count_several_data(cells)
        if count:
            print(f"{count} runs were made on several data sets called {name}; without {name}=DIR the first is taken")
    for title, one in study.outline.evaluations.items():
        count = store.count_scores_of_other_data(study.cells, one)
        if count and one.data is not None:
            folder = data_folder(one.data, folders)
            print(printable(f"{title}: {count} scores here are of other data than {folder}; they are not taken"))


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
