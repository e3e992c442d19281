"""While a run trains: pictures of the same few images at set moments, and the page, written anew every minute."""

from __future__ import annotations

import io
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from adclr import report
from adclr.config.sections import UserError
from adclr.data.decode import Pixels, Unreadable
from adclr.data.sources import Source
from adclr.features import analysis, pictures
from adclr.features.analysis import Box, Floats, Grid, Seen
from adclr.report.story import PICTURES, read_moments
from adclr.system.files import write_atomically
from adclr.system.runs import Run
from adclr.system.text import printable
from adclr.weights.backbone import Weights

MOMENTS = (0.0, 0.01, 0.03, 0.06, 0.12, 0.25, 0.5, 0.75, 1.0)  # of the training; more is learned early than late
IMAGES = 3
TRIED = 20  # images that may be unreadable before there are no pictures
CELL, GAP = 104, 4  # pixels
SECONDS = 60.0  # between pages: one takes 0.1 s


class Live:
    """`live(step)` after each step; nothing of it, and no fault of the disk, stops or changes the training."""

    def __init__(self, run: Run, weights: Weights, source: Source, total_steps: int) -> None:
        self.run, self.weights = run, weights
        self.moments = moments(total_steps)
        self.seen = choose(source, weights) if weights.vit.query_keys != "all" else []
        self.written = time.monotonic()
        self.failed = False

    def begin(self, step: int) -> None:
        """At the start, or where the run is resumed: pictures of later steps belong to what is done again."""
        folder = self.run.path / PICTURES
        if step == 0:
            shutil.rmtree(folder, ignore_errors=True)
        self._try(lambda: self._first(folder))
        self(step)

    def _first(self, folder: Path) -> None:
        if self.seen:
            _save(folder / "images.jpg", originals(self.seen))

    def __call__(self, step: int) -> None:
        due = step in self.moments and self.seen
        if due:
            folder = self.run.path / PICTURES
            before = last_strip(folder, step)
            self._try(lambda: _save(folder / f"step_{step}.jpg", strip(self.weights, self.seen, before)))
        if due or time.monotonic() - self.written > SECONDS:
            self.page()

    def page(self) -> None:
        self._try(lambda: report.run([str(self.run.path)], None))
        self.written = time.monotonic()

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except (OSError, UserError) as error:
            if not self.failed:
                print(printable(f"the report cannot be written ({error}); training goes on"), file=sys.stderr)
            self.failed = True


def moments(total_steps: int) -> set[int]:
    """The steps after which pictures are drawn."""
    return {round(share * total_steps) for share in MOMENTS}


def choose(source: Source, weights: Weights) -> list[tuple[Seen, Box]]:
    """The readable images of the smallest keys, which hang on nothing but their names, with a query each."""
    size, patch = 2 * min(weights.vit.input_size), weights.vit.patch_size
    found: list[tuple[Seen, Box]] = []
    for index in np.argsort(source.keys, kind="stable")[:TRIED].tolist():
        try:
            pixels = weights.decoder(source.read(index))
        except (Unreadable, OSError):
            continue
        seen = analysis.see(source.paths[index], _square(pixels), size, patch)
        found.append((seen, analysis.drawn_boxes(seen, int(source.keys[index]), 1)[0]))
        if len(found) == IMAGES:
            break
    return found


def _square(pixels: Pixels) -> Pixels:
    """The middle, so that strips are of one width."""
    height, width = pixels.shape[1:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels[:, top : top + side, left : left + side]


def originals(chosen: Sequence[tuple[Seen, Box]]) -> Image.Image:
    """The strip beside which the others stand: each image over the height of its three cells, with its query in one."""
    cells = []
    for seen, box in chosen:
        image = pictures.shown(seen.pixels, CELL)
        cells += [image, pictures.marked(image, [box]), image]
    return _stacked(cells)


def last_strip(folder: Path, step: int) -> Image.Image | None:
    """The strip drawn last before a step, by this process or by the one that was resumed."""
    try:
        earlier = [moment for moment in read_moments(folder) if moment.step < step]
        return Image.open(earlier[-1].file).convert("RGB") if earlier else None
    except OSError:  # broken, or gone meanwhile
        return None


def strip(weights: Weights, chosen: Sequence[tuple[Seen, Box]], before: Image.Image | None = None) -> Image.Image:
    """From top to bottom, of each image: attention of `[CLS]`, of its query, and the components of its patches.

    The components have the order and the signs that come nearest to the colours of the strip before."""
    patches = [analysis.features(weights, seen) for seen, _ in chosen]
    basis = analysis.basis(torch.cat(patches))
    if before is not None and before.size == _size(3 * len(chosen)):
        grids = [seen.grid(weights.vit) for seen, _ in chosen]
        basis = basis.aligned(torch.cat(patches), np.concatenate(_colours(before, grids)))
    cells = []
    for (seen, box), part in zip(chosen, patches, strict=True):
        image, memory = pictures.shown(seen.pixels, CELL), analysis.read(weights, seen)
        for crops in (None, seen.crop(box, weights.vit.patch_size)[None]):
            maps, _ = analysis.gaze(weights, seen, memory, crops)
            cells.append(pictures.attention(image, maps[0, 0]))
        cells.append(pictures.tinted(image, basis.colours(part).reshape(*seen.grid(weights.vit), 3)))
    return _stacked(cells)


def _colours(drawn: Image.Image, grids: Sequence[Grid]) -> list[Floats]:
    """N×3 of each image: the colours of its patches, as a strip shows them."""
    found = []
    for number, (rows, columns) in enumerate(grids):
        top = (3 * number + 2) * (CELL + GAP)
        cell = drawn.crop((0, top, CELL, top + CELL)).resize((columns, rows), Image.Resampling.BOX)
        found.append(np.asarray(cell, np.float32).reshape(-1, 3) / np.float32(255))
    return found


def _size(cells: int) -> tuple[int, int]:
    return CELL, cells * (CELL + GAP) - GAP


def _stacked(cells: Sequence[Image.Image]) -> Image.Image:
    found = Image.new("RGB", _size(len(cells)), "grey")  # seen on light and on dark paper
    for number, cell in enumerate(cells):
        found.paste(cell, (0, number * (CELL + GAP)))
    return found


def _save(path: Path, image: Image.Image) -> None:
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=88)
    write_atomically(path, buffer.getvalue(), durable=False)
