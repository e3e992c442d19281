"""Weights for other programs: timm, Hugging Face, ONNX, or safetensors and a description as in a run.

A folder with the files and a model card, written beside its place and renamed when it is whole. Where the program that
they are for is installed, it has read them by then and given our outputs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from adclr.config.sections import UserError
from adclr.model.vit import VisionTransformer
from adclr.system import outputs
from adclr.system.files import check_writable, read_json, sync, write_json
from adclr.system.runs import provenance
from adclr.weights import snapshot
from adclr.weights.backbone import load_weights
from adclr.weights.export import card, onnx
from adclr.weights.export.formats import WRITERS, Made

RECORD = "export.json"  # what was written and how it was tried
TOLERANCE = 1e-4  # of the largest output


def export(
    weights: str | Path,
    to: str,
    out: str | Path,
    partial: bool = False,
    input_size: int | tuple[int, int] | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a W into the folder `out` for another program, and says on stdout what was done.

    An export that is there already is replaced if nobody has changed its files; with `overwrite` any files of the same
    names are. Other files in the folder stay.
    """
    if to not in WRITERS:
        raise UserError(f"there is no export to {to!r}; choose {', '.join(WRITERS)}")
    place = Path(os.path.abspath(out))
    check_writable(place)
    before = None if overwrite else _check_output(place, Path(out))
    if to == "onnx":
        onnx.check_installed()
    found = load_weights(weights, partial, input_size)
    parents = [parent for parent in place.parents if not parent.exists()]
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        made = WRITERS[to](found, temporary)
        checked = check(found.vit, made)
        text = card.write(found, card.find_run(str(weights)), made.library, made.usage, made.notes, checked)
        (temporary / "README.md").write_text(text, encoding="utf-8", errors="backslashreplace")
        # as in the card, no path of this machine
        made_by = {name: value for name, value in provenance().items() if name != "command"}
        report = found.report.as_json() | {"source": card.last_part(found.report.source)} if found.report else None
        facts = {"format": to, "checked": checked, "notes": made.notes, "weights": report, "provenance": made_by}
        files = {path.name: snapshot.facts(path) for path in sorted(temporary.iterdir())}
        write_json(temporary / RECORD, facts | {"files": files} | outputs.signature("export"))
        for path in temporary.iterdir():
            _sync(path)
        _move(temporary, place, before)
    except BaseException as error:
        if isinstance(error, OSError):  # named as the user knows it, not by a folder that is removed
            error.filename = str(error.filename or place).replace(str(temporary), str(place))
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in parents:
            with suppress(OSError):
                parent.rmdir()
        raise
    for line in (*made.notes, *checked):
        print(line)
    print(f"written to {out}: {', '.join(sorted([*files, RECORD]))}")
    return place


def _check_output(folder: Path, out: Path) -> dict[str, Any]:
    """Returns the files of the export that is in a folder; refuses whatever else is there."""
    if not folder.exists():
        return {}
    if not folder.is_dir():
        raise UserError(f"{out} is a file; give the name of a folder")
    if not any(folder.iterdir()):
        return {}
    record = folder / RECORD
    try:
        files = read_json(record)["files"]
        listed = outputs.author(record) == "export" and all(name == os.path.basename(name) for name in files)
    except (UserError, TypeError, KeyError, AttributeError):
        listed = False
    if not listed:
        raise UserError(f"{out} was not written by adclr export; {outputs.REMEDY}")
    for name, known in files.items():
        if os.path.lexists(folder / name) and snapshot.facts(folder / name) != known:
            raise UserError(f"{out}/{name} was changed since adclr export wrote it; {outputs.REMEDY}")
    return dict(files)


def _move(temporary: Path, folder: Path, before: Mapping[str, Any] | None) -> None:
    """Puts a whole export where it belongs: a new folder at once, else file by file, what says what they are last.

    `before` are the files of the export that is there, which may be replaced; None: any may.
    """
    if not folder.exists():
        os.rename(temporary, folder)
        sync(folder.parent)
        return
    names = sorted((path.name for path in temporary.iterdir()), key=lambda name: name == RECORD)
    for name in names:
        own = before is None or name in before or name == RECORD
        if os.path.lexists(folder / name) and not own:
            raise UserError(f"{folder / name} was not written by adclr export; {outputs.REMEDY}")
    for name in names:
        os.replace(temporary / name, folder / name)
    for name in set(before or ()) - set(names):
        (folder / name).unlink(missing_ok=True)
    temporary.rmdir()
    sync(folder)


def check(vit: VisionTransformer, made: Made) -> list[str]:
    """What the program that they are for makes of the files, on images of two sizes; other outputs are a refusal."""
    try:
        program, outputs = made.reader()
    except ImportError as error:
        return [f"not tried: {error.name or error} is not installed here"]
    patch, (height, width) = vit.patch_size, vit.input_size
    other = (patch * max(1, vit.grid[0] // 2 + 1), patch * max(2, vit.grid[1] // 2))
    sizes = [(height, width), other] if made.any_size else [(height, width)]
    worst = 0.0
    for size in sizes:
        images = torch.randn(2, vit.num_channels, *size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            ours, theirs = vit(images), outputs(images)
        for a, b in zip((ours.cls, ours.patches), theirs, strict=True):
            worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp(min=1)))
    tried = " and ".join(f"{h}x{w}" for h, w in sizes)
    if not worst <= TOLERANCE:
        raise UserError(f"{program} gives other outputs, by {worst:.1e}, so nothing was written; try another version")
    return [f"{program} reads it and gives the same outputs, to {worst:.0e}, on images of {tried} pixels"]


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
