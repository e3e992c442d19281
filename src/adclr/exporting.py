"""Weights for other programs: timm, Hugging Face, ONNX, or safetensors and a description as in a run.

A folder with the files and a model card, written beside its place and renamed when it is whole. Where the program that
they are for is installed, it has read them by then and given our outputs.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import torch

from adclr import card, portable
from adclr.config import UserError
from adclr.formats import WRITERS, Made
from adclr.runs import check_writable, provenance, sync, write_json
from adclr.vit import VisionTransformer
from adclr.weights import load_weights

TOLERANCE = 1e-4  # of the largest output


def export(
    weights: str | Path,
    to: str,
    out: str | Path,
    partial: bool = False,
    input_size: int | tuple[int, int] | None = None,
) -> Path:
    """Writes a W into the folder `out` for another program, and says on stdout what was done."""
    if to not in WRITERS:
        raise UserError(f"there is no export to {to!r}; choose {', '.join(WRITERS)}")
    place = Path(os.path.abspath(out))
    check_writable(place)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UserError(f"{out} is there already; choose another --out or remove it")
    if to == "onnx":
        portable.check_installed()
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
        write_json(temporary / "export.json", facts)
        for path in temporary.iterdir():
            _sync(path)
        os.rename(temporary, place)
        sync(place.parent)
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
    print(f"written to {out}: {', '.join(sorted(path.name for path in place.iterdir()))}")
    return place


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
