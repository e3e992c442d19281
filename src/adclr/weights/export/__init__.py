"""Export of weights for other programs: timm, Hugging Face, ONNX, or safetensors and a description as in a run.

The files and a model card are written to a temporary folder, which is renamed when it is complete. If the program that
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

from adclr.config.parsing import UserError
from adclr.model.vit import VisionTransformer
from adclr.system import outputs
from adclr.system.files import check_writable, read_json, sync, write_json
from adclr.system.runs import provenance
from adclr.system.store_urls import conceal, is_remote
from adclr.system.stores import mirror as store_mirror
from adclr.system.text import printable
from adclr.weights import snapshot
from adclr.weights.backbone import load_weights
from adclr.weights.export import card, onnx
from adclr.weights.export.formats import NETWORK_FORMATS, WRITERS, Export

RECORD = "export.json"  # what was written and how it was checked
TOLERANCE = 1e-4  # of the largest output


def export(
    weights: str | os.PathLike[str],
    to: str,
    out: str | Path,
    partial: bool = False,
    input_size: int | tuple[int, int] | None = None,
    overwrite: bool = False,
) -> Path | str:
    """Write weights into the folder or URL `out` for another program, and print what was written.

    `to` is timm, huggingface, onnx or safetensors. An earlier export is replaced if its files were not changed since,
    and with `overwrite` in any case. Other files in the folder stay.
    """
    if to not in WRITERS:
        raise UserError(f"cannot export to {to!r}; choose {', '.join(WRITERS)}")
    url = conceal(os.fspath(out))
    if is_remote(url):
        with store_mirror.uploaded(url, RECORD) as copy:
            export(weights, to, copy, partial, input_size, overwrite)
        print(f"uploaded to {url}")
        return url
    folder = Path(os.path.abspath(out))
    check_writable(folder)
    earlier_files = None if overwrite else _check_output(folder, Path(out))
    if to == "onnx":
        onnx.check_installed()
    loaded = load_weights(weights, partial, input_size, networks=to in NETWORK_FORMATS)
    report = loaded.report
    parents = [parent for parent in folder.parents if not parent.exists()]
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        written = WRITERS[to](loaded, temporary)
        checks = _check(loaded.vit, written)
        run = card.find_run(os.fspath(weights))
        text = card.write(loaded, run, written.library, written.usage, written.notes, checks)
        (temporary / "README.md").write_text(text, encoding="utf-8", errors="backslashreplace")
        # as in the card, no path of this machine
        facts = {
            "format": to,
            "checked": checks,
            "notes": written.notes,
            "weights": report.as_json() | {"source": card.last_part(report.source)} if report else None,
            "provenance": {name: value for name, value in provenance().items() if name != "command"},
        }
        files = {path.name: snapshot.describe_file(path) for path in sorted(temporary.iterdir())}
        write_json(temporary / RECORD, facts | {"files": files} | outputs.signature("export"))
        for path in temporary.iterdir():
            _sync(path)
        _move(temporary, folder, earlier_files)
    except BaseException as error:
        if isinstance(error, OSError):  # with the name that the user gave, not of a folder that is removed
            error.filename = str(error.filename or folder).replace(str(temporary), str(folder))
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in parents:
            with suppress(OSError):
                parent.rmdir()
        raise
    for line in (*written.notes, *checks):
        print(line)
    print(f"written to {printable(str(out))}: {', '.join(sorted([*files, RECORD]))}")
    return folder


def _check_output(folder: Path, out: Path) -> dict[str, Any]:
    """Return the files of the export in a folder; refuse a folder with anything else in it."""
    if not folder.exists():
        return {}
    if not folder.is_dir():
        raise UserError(f"{out} is a file; give the name of a folder")
    if not any(folder.iterdir()):
        return {}
    record = folder / RECORD
    try:
        files = read_json(record)["files"]
        listed = outputs.read_author(record) == "export" and all(name == os.path.basename(name) for name in files)
    except (UserError, TypeError, KeyError, AttributeError):
        listed = False
    if not listed:
        raise UserError(f"{out} was not written by adclr export; {outputs.REMEDY}")
    for name, known in files.items():
        if os.path.lexists(folder / name) and snapshot.describe_file(folder / name) != known:
            raise UserError(f"{out}/{name} was changed since adclr export wrote it; {outputs.REMEDY}")
    return dict(files)


def _move(temporary: Path, folder: Path, earlier_files: Mapping[str, Any] | None) -> None:
    """Move a complete export into place: a new folder at once, else file by file, the record last.

    `earlier_files` are those of an earlier export, which may be replaced; None: any may.
    """
    if not folder.exists():
        os.rename(temporary, folder)
        sync(folder.parent)
        return
    names = sorted((path.name for path in temporary.iterdir()), key=lambda name: name == RECORD)
    for name in names:
        replaceable = earlier_files is None or name in earlier_files or name == RECORD
        if os.path.lexists(folder / name) and not replaceable:
            raise UserError(f"{folder / name} was not written by adclr export; {outputs.REMEDY}")
    for name in names:
        os.replace(temporary / name, folder / name)
    for name in set(earlier_files or ()) - set(names):
        (folder / name).unlink(missing_ok=True)
    temporary.rmdir()
    sync(folder)


def _check(vit: VisionTransformer, written: Export) -> list[str]:
    """Compare the outputs of the target program with ours on images of two sizes; refuse if they differ."""
    try:
        program, outputs = written.reader()
    except ImportError as error:
        return [f"not checked: {error.name or error} is not installed"]
    patch, (height, width) = vit.patch_size, vit.input_size
    other = (patch * max(1, vit.grid[0] // 2 + 1), patch * max(2, vit.grid[1] // 2))
    sizes = [(height, width), other] if written.any_size else [(height, width)]
    worst = 0.0
    for size in sizes:
        images = torch.randn(2, vit.num_channels, *size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            ours, theirs = vit(images), outputs(images)
        for a, b in zip((ours.cls, ours.patches), theirs, strict=True):
            worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp(min=1)))
    tried_sizes = " and ".join(f"{h}x{w}" for h, w in sizes)
    if not worst <= TOLERANCE:
        raise UserError(
            f"outputs of {program} differ by {worst:.1e}, so nothing was written; try another version of it"
        )
    return [f"{program} loads these weights; outputs agree to {worst:.0e} on images of {tried_sizes} pixels"]


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
