"""Evaluations of a backbone, one module each: `Settings`, and `run(settings, prefix)`, which returns the scores.

They know a backbone and labeled data, nothing of how the backbone was trained. Scores are numbers by name, and tables
of numbers, such as those of each class, under one name. `prefix` is a path without a suffix: further files of an
evaluation are the picture PREFIX.png and the folder PREFIX.
"""

from __future__ import annotations

import importlib
import os
import time
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from adclr.config import parsing
from adclr.config.parsing import UserError
from adclr.data.collection import describe_inside
from adclr.evals import score_text
from adclr.system import outputs
from adclr.system.files import check_writable, read_json, write_json
from adclr.system.outputs import is_searched
from adclr.system.runs import provenance
from adclr.system.store_urls import conceal, is_remote
from adclr.system.text import as_utf8, printable, printable_lines

PICTURE, FOLDER = ".png", ""  # suffixes of the prefix
# the further files of each evaluation
WRITES: dict[str, tuple[str, ...]] = {
    "knn": (PICTURE,),
    "linear": (PICTURE,),
    "finetune": (PICTURE, FOLDER),
    "transfer": (FOLDER,),
    "matching": (),
    "incontext": (PICTURE,),
    "segmentation": (PICTURE, FOLDER),
    "video": (PICTURE,),
    "detection": (PICTURE, FOLDER),
}
# folders of a data set that are searched for images; a labeled folder without any of them is searched as a whole
LABELED = ("knn", "linear", "finetune", "transfer", "matching")
SEARCHED = ("train", "val", "images", "labels", "annotations", "JPEGImages", "Annotations")
NAMES = tuple(WRITES)


def import_evaluation(name: str) -> ModuleType:
    """Import and return the module of an evaluation."""
    if name not in NAMES:
        raise UserError(f"unknown evaluation '{name}'; there are: {', '.join(NAMES)}")
    return importlib.import_module(f"adclr.evals.{name}")


def load_recipe(name: str, chosen: str | None) -> dict[str, Any]:
    """Return the settings of a recipe: a .yaml file, or one of recipes/evaluate for this evaluation."""
    if chosen is None:
        return {}
    if not chosen.endswith((".yaml", ".yml")) and not chosen.startswith(f"{name}_"):
        raise UserError(f"recipe '{chosen}' is not one of {name}{recipe_hint(name) or ', which has none'}")
    return parsing.load_recipe(chosen, "evaluate")


def recipe_hint(name: str) -> str:
    """Return the names of the recipes of an evaluation in parentheses, or nothing if it has none."""
    recipes = [recipe for recipe in parsing.recipe_names("evaluate") if recipe.startswith(f"{name}_")]
    return f" (recipes: {', '.join(recipes)})" if recipes else ""


def evaluate(
    name: str,
    out: str | Path | None = None,
    recipe: str | Path | None = None,
    overwrite: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Return the scores of an evaluation: `evaluate("knn", weights="runs/photos", data="labeled/")`.

    With `out`, a .json file, they are written there too; `overwrite` replaces files of other programs.
    """
    data = settings.get("data")
    if isinstance(data, list | tuple):
        settings["data"] = [conceal(os.fspath(path)) for path in data]
    settings |= {key: conceal(value) for key, value in settings.items() if isinstance(value, str)}
    layers = load_recipe(name, None if recipe is None else os.fspath(recipe)), settings
    all_settings = parsing.build(import_evaluation(name).Settings, *layers)
    return run_evaluation(name, all_settings, None if out is None else Path(out), overwrite=overwrite)


def run_evaluation(
    name: str, settings: Any, out: Path | None, say: bool = False, overwrite: bool = False
) -> dict[str, Any]:
    """Return the scores; the first process writes them to `out`, and with `say` prints them."""
    prefix = None
    if out is not None:
        prefix = out.with_suffix("") if out.suffix == ".json" else out.with_name(out.name + "-more")
        _check_output(name, settings, out, prefix, overwrite)
    from adclr.system import devices, distributed

    started = time.monotonic()
    with distributed.session(devices.select_device(settings.device)):
        scores: dict[str, Any] = import_evaluation(name).run(settings, prefix)
        if distributed.is_main():
            seconds = round(time.monotonic() - started, 1)
            if say:
                print(f"{printable_lines(format_scores(scores))}\n{seconds:.0f} seconds")
                for line in score_text.compare_with_control(name, settings, scores, *_controls(name, settings, out)):
                    print(printable(line))
            if out is not None:
                facts = provenance() | {"seconds": seconds, "processes": distributed.world_size()}
                facts |= outputs.signature("evaluate")
                write_json(out, {"scores": scores, "settings": settings.model_dump(mode="json"), "provenance": facts})
            if out is not None and say:
                print(printable(f"written to {out}"))
        distributed.barrier()
    return scores


def _check_output(name: str, settings: Any, out: Path, prefix: Path, overwrite: bool) -> None:
    """Refuse to overwrite files of the user, or to write among the images that are scored."""
    check_writable(out)
    writes = WRITES[name]
    pictures = [prefix.with_name(prefix.name + suffix) for suffix in writes if suffix]
    outputs.check_overwrite("evaluate", [out, *pictures], overwrite, record=out)
    if FOLDER in writes and os.path.lexists(prefix) and not overwrite and not _is_output(prefix):
        raise UserError(f"{prefix} was not written by adclr evaluate; {outputs.REMEDY}")
    for data in settings.data if isinstance(settings.data, tuple) else (settings.data,):
        if is_searched(out.parent, searched_folders(name, data)):
            raise UserError(describe_inside(out, data))


def searched_folders(name: str, data: str) -> list[str]:
    """Return the folders of a data set in which an evaluation searches for images; none if it is in a store."""
    root = data if os.path.isdir(data) else data.partition(":")[2]
    if not root or is_remote(data):
        return []
    folders = [folder for part in SEARCHED if os.path.isdir(folder := os.path.join(root, part))]
    return folders or [root] * (name in LABELED)


def _is_output(folder: Path) -> bool:
    """Return whether an evaluation has trained in a folder, or written scores of single data sets there."""
    if not folder.is_dir():
        return False
    lock, entries = folder / ".lock", list(folder.iterdir())
    if lock in entries:  # in version 0.1 it was empty, as in a run of pretraining, which has settings.yaml too
        empty = not lock.stat().st_size and folder / "settings.yaml" not in entries
        return empty or outputs.read_author(lock) == "evaluate"
    return not entries or any(_is_data_set_score(entry) if entry.is_file() else _is_output(entry) for entry in entries)


def _is_data_set_score(file: Path) -> bool:
    """Return whether a file has the scores of one data set of `transfer`, which version 0.1 wrote unsigned."""
    if file.suffix != ".json":
        return False
    if outputs.read_author(file) == "evaluate":
        return True
    try:
        value = read_json(file)
    except UserError:
        return False
    return isinstance(value, dict) and set(value) == {"scores", "identity"}


def format_scores(scores: dict[str, Any]) -> str:
    """Return numbers and texts, one a line, and the table of data sets; scores of each class are left to the file."""
    width = max(len(key) for key in scores)
    lines = []
    for key, value in scores.items():
        if isinstance(value, float):
            lines.append(f"{key:<{width}} {score_text.with_unit(key, value)}")
        elif isinstance(value, str):
            lines.append(f"{key:<{width}} {value}")
    if "table" in scores:
        lines.append(importlib.import_module("adclr.evals.transfer").table(scores["table"]))
    return "\n".join(lines)


def _controls(name: str, settings: Any, out: Path | None) -> tuple[Path, list[Path]]:
    """Return the file of the same evaluation from scratch, and the folders that may have it under another name."""
    control = result_path(name, settings.model_copy(update={"from_scratch": True}))
    return control, [control.parent, *([] if out is None else [out.parent])]


def result_path(name: str, settings: Any) -> Path:
    """Return evals/NAME/DATA-HASH.json beside the weights; the hash is of the data's path and all other settings.

    The weights of a run are not hashed, so that the run can be moved; those of a folder with many weights are. Scores
    of weights in a store are in runs/evals/NAME.
    """
    weights, remote = Path(settings.weights), is_remote(settings.weights)
    of_run = not remote and (os.path.isdir(weights) or weights.name == "backbone.safetensors")
    data = settings.data if isinstance(settings.data, tuple) else (settings.data,)
    paths = [os.path.abspath(path) if os.path.exists(path) else path for path in data]
    readable_paths = [as_utf8(path) for path in paths]
    update = {
        "weights": "" if of_run else as_utf8(settings.weights if remote else weights.name),
        "data": tuple(readable_paths) if isinstance(settings.data, tuple) else readable_paths[0],
    }
    # by the names of version 0.1, so that its scores are found
    text = settings.model_copy(update=update).model_dump_json(by_alias=True)
    digest = blake2b(text.encode(), digest_size=4).hexdigest()
    names = "+".join(os.path.basename(path.rstrip("/")) for path in paths)[:100]
    folder = Path("runs") if remote else weights if os.path.isdir(weights) else weights.parent
    return folder / "evals" / name / f"{names}-{digest}.json"
