"""Evaluations: one file each, one shape each: `Settings` and `run(settings, place) -> scores`.

They know a backbone and labelled data, nothing of how the backbone was trained. Scores are numbers by name, and where
there are many, of each class for one, a table of them under one name. `place` is a path without a suffix: what else an
evaluation writes (a picture, a trained model) lies there or in files of that name.
"""

from __future__ import annotations

import importlib
import os
import time
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from adclr.config import sections
from adclr.config.sections import UserError
from adclr.data.sources import is_searched
from adclr.evals import wording
from adclr.system import outputs
from adclr.system.files import check_writable, read_json, write_json
from adclr.system.runs import provenance
from adclr.system.text import as_utf8, printable_lines

PICTURE, FOLDER = ".png", ""  # what is put behind PLACE for the name of a picture, and of a folder
# what each evaluation writes beside its JSON file
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
# folders of a data set that are searched for images; a labelled folder without any of them is all searched
LABELLED = ("knn", "linear", "finetune", "transfer")
SEARCHED = ("train", "val", "images", "labels", "annotations", "JPEGImages", "Annotations")
NAMES = ("knn", "linear", "finetune", "transfer", "matching", "incontext", "segmentation", "video", "detection")


def module(name: str) -> ModuleType:
    if name not in NAMES:
        raise UserError(f"unknown evaluation '{name}'; there are: {', '.join(NAMES)}")
    return importlib.import_module(f"adclr.evals.{name}")


def recipe_of(name: str, chosen: str | None) -> dict[str, Any]:
    """The settings of a recipe: a .yaml file, or one of recipes/evaluate that is for this evaluation."""
    if chosen is None:
        return {}
    if not chosen.endswith((".yaml", ".yml")) and not chosen.startswith(f"{name}_"):
        raise UserError(f"recipe '{chosen}' is not one of {name}{recipe_hint(name) or ', which has none'}")
    return sections.recipe(chosen, "evaluate")


def recipe_hint(name: str) -> str:
    known = [one for one in sections.recipe_names("evaluate") if one.startswith(f"{name}_")]
    return f" (recipes: {', '.join(known)})" if known else ""


def evaluate(
    name: str,
    out: str | Path | None = None,
    recipe: str | Path | None = None,
    overwrite: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """`evaluate("knn", weights="runs/photos", data="labelled/")`; with `out`, a .json file, it is written there too.

    `overwrite` replaces files of other programs there.
    """
    data = settings.get("data")
    if isinstance(data, list | tuple):
        settings["data"] = [os.fspath(one) for one in data]
    layers = recipe_of(name, None if recipe is None else os.fspath(recipe)), settings
    built = sections.build(module(name).Settings, *layers)
    return score(name, built, None if out is None else Path(out), overwrite=overwrite)


def score(name: str, settings: Any, out: Path | None, say: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """The scores, written to a file if there is one; in several processes by the first."""
    place = None
    if out is not None:
        place = out.with_suffix("") if out.suffix == ".json" else out.with_name(out.name + "-more")
        _check_output(name, settings, out, place, overwrite)
    from adclr.system import devices, distributed

    started = time.monotonic()
    with distributed.session(devices.choose(settings.device)):
        scores: dict[str, Any] = module(name).run(settings, place)
        if distributed.is_main():
            seconds = round(time.monotonic() - started, 1)
            if say:
                print(f"{printable_lines(told(scores))}\n{seconds:.0f} seconds")
                for line in wording.verdict(name, settings, scores, *_controls(name, settings, out)):
                    print(line)
            if out is not None:
                facts = provenance() | {"seconds": seconds, "processes": distributed.world_size()}
                facts |= outputs.signature("evaluate")
                write_json(out, {"scores": scores, "settings": settings.model_dump(mode="json"), "provenance": facts})
            if out is not None and say:
                print(f"written to {out}")
        distributed.barrier()
    return scores


def _check_output(name: str, settings: Any, out: Path, place: Path, overwrite: bool) -> None:
    """Refuses to write over files of the user, or among the images that are scored."""
    check_writable(out)
    writes = WRITES[name]
    pictures = [place.with_name(place.name + ending) for ending in writes if ending]
    outputs.check("evaluate", [out, *pictures], overwrite, record=out)
    if FOLDER in writes and os.path.lexists(place) and not overwrite and not _is_own(place):
        raise UserError(f"{place} was not written by adclr evaluate; {outputs.REMEDY}")
    for data in settings.data if isinstance(settings.data, tuple) else (settings.data,):
        root = data if os.path.isdir(data) else data.partition(":")[2]
        folders = [folder for part in SEARCHED if os.path.isdir(folder := os.path.join(root, part))]
        folders = folders or [root] * (name in LABELLED)
        if writes and root and is_searched(out.parent, folders):
            raise UserError(
                f"{out} lies in the collection {root}, where pictures would be taken for images; choose another --out"
            )


def _is_own(folder: Path) -> bool:
    """Whether an evaluation has trained in a folder, or has written the parts of its scores there."""
    if not folder.is_dir():
        return False
    lock, entries = folder / ".lock", list(folder.iterdir())
    if lock in entries:  # in version 0.1 it was empty, as in a run of pretraining, which has settings.yaml too
        empty = not lock.stat().st_size and folder / "settings.yaml" not in entries
        return empty or outputs.author(lock) == "evaluate"
    return not entries or any(_is_part(entry) if entry.is_file() else _is_own(entry) for entry in entries)


def _is_part(file: Path) -> bool:
    """Whether a file holds the scores of one data set of `transfer`; in version 0.1 it had no words."""
    if file.suffix != ".json":
        return False
    if outputs.author(file) == "evaluate":
        return True
    try:
        value = read_json(file)
    except UserError:
        return False
    return isinstance(value, dict) and set(value) == {"scores", "identity"}


def told(scores: dict[str, Any]) -> str:
    """For a person: numbers and words, one a line, and a table if there is one; each class is left to the file."""
    width = max(len(key) for key in scores)
    lines = []
    for key, value in scores.items():
        if isinstance(value, float):
            lines.append(f"{key:<{width}} {wording.with_unit(key, value)}")
        elif isinstance(value, str):
            lines.append(f"{key:<{width}} {value}")
    if "table" in scores:
        lines.append(importlib.import_module("adclr.evals.transfer").table(scores["table"]))
    return "\n".join(lines)


def _controls(name: str, settings: Any, out: Path | None) -> tuple[Path, list[Path]]:
    """Returns where the same evaluation from scratch is written, and the folders that may hold it under other names."""
    control = file_of(name, settings.model_copy(update={"from_scratch": True}))
    return control, [control.parent, *([] if out is None else [out.parent])]


def file_of(name: str, settings: Any) -> Path:
    """evals/NAME/DATA-HASH.json beside the weights; the hash tells data of one name and other settings apart.

    In the hash, settings have the names of version 0.1, so that the scores of that version are found.
    A run's own weights are not in the hash, so that a run can be moved; the many that may lie in one folder are.
    """
    weights = Path(settings.weights)
    own = os.path.isdir(weights) or weights.name == "backbone.safetensors"
    data = settings.data if isinstance(settings.data, tuple) else (settings.data,)
    places = [os.path.abspath(one) if os.path.exists(one) else one for one in data]
    told = [as_utf8(place) for place in places]
    update = {
        "weights": "" if own else as_utf8(weights.name),
        "data": tuple(told) if isinstance(settings.data, tuple) else told[0],
    }
    text = settings.model_copy(update=update).model_dump_json(by_alias=True)
    hashed = blake2b(text.encode(), digest_size=4).hexdigest()
    named = "+".join(os.path.basename(place.rstrip("/")) for place in places)[:100]
    return (weights if os.path.isdir(weights) else weights.parent) / "evals" / name / f"{named}-{hashed}.json"
