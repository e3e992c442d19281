"""The report of a run that is training: pictures of the same few images after some steps, and the page every minute."""

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
from adclr.config.parsing import UserError
from adclr.data.decode import Pixels, Unreadable
from adclr.data.key_order import smallest
from adclr.data.sources import Source
from adclr.features import analysis, drawing
from adclr.features.analysis import Box, Floats, Grid, InputImage
from adclr.report.record import PICTURE_FOLDER, list_strips
from adclr.system.files import write_atomically
from adclr.system.runs import Run
from adclr.system.text import printable
from adclr.weights.backbone import Weights

PICTURE_TIMES = (0.0, 0.01, 0.03, 0.06, 0.12, 0.25, 0.5, 0.75, 1.0)  # of the training; more is learned early than late
NUM_IMAGES = 3
MAX_TRIED = 20  # images read to get NUM_IMAGES readable ones
CELL, GAP = 104, 4  # pixels
PAGE_SECONDS = 60.0  # between pages: one takes 0.1 s


class LiveReport:
    """Keeps pictures and page up to date: `live(step)` after each step. No disk error stops or changes the training."""

    def __init__(self, run: Run, weights: Weights, source: Source, total_steps: int) -> None:
        self.run, self.weights = run, weights
        self.folder = run.path / PICTURE_FOLDER
        self.steps = picture_steps(total_steps)
        drawable = weights.network is None and weights.vit.query_keys != "all"  # a picture shows attention
        self.images = choose_images(source, weights) if drawable else []
        self.page_time = time.monotonic()
        self.failed = False

    def begin(self, step: int) -> None:
        """Start at step 0, or at the step of a resume: pictures of earlier steps are kept."""
        if step == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.images:
            self._try(lambda: _save(self.folder / "images.jpg", _draw_images(self.images)))
        self(step)

    def __call__(self, step: int) -> None:
        """Draw pictures if they are due after this step, and write the page if it is."""
        draw = step in self.steps and bool(self.images)
        if draw:
            self._try(lambda: self._draw(step))
        if draw or time.monotonic() - self.page_time > PAGE_SECONDS:
            self.page()

    def page(self) -> None:
        """Write the page."""
        self._try(lambda: report.write_report([str(self.run.path)], None))
        self.page_time = time.monotonic()

    def _draw(self, step: int) -> None:
        strip = draw_strip(self.weights, self.images, read_last_strip(self.folder, step))
        _save(self.folder / f"step_{step}.jpg", strip)

    def _try(self, write: Callable[[], object]) -> None:
        """Write something; report only the first error."""
        try:
            write()
        except (OSError, UserError) as error:
            if not self.failed:
                print(printable(f"the report cannot be written ({error}); training continues"), file=sys.stderr)
            self.failed = True


def picture_steps(total_steps: int) -> set[int]:
    """Return the steps after which pictures are drawn."""
    return {round(share * total_steps) for share in PICTURE_TIMES}


def choose_images(source: Source, weights: Weights) -> list[tuple[InputImage, Box]]:
    """Return the readable images of the smallest keys, which depend on their names only, with a query box each."""
    size, patch = 2 * min(weights.vit.input_size), weights.vit.patch_size
    images: list[tuple[InputImage, Box]] = []
    for index in smallest(source.keys, MAX_TRIED).tolist():
        try:
            pixels = weights.decoder(source.read(index))
        except (Unreadable, OSError):
            continue
        image = analysis.prepare_image(source.paths[index], _crop_square(pixels), size, patch)
        images.append((image, analysis.draw_boxes(image, int(source.keys[index]), 1)[0]))
        if len(images) == NUM_IMAGES:
            break
    return images


def _crop_square(pixels: Pixels) -> Pixels:
    """Return the center of an image, so that all strips have the same width."""
    height, width = pixels.shape[1:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels[:, top : top + side, left : left + side]


def _draw_images(images: Sequence[tuple[InputImage, Box]]) -> Image.Image:
    """Return the strip of the images themselves: each three times, as high as its maps, the second with its query."""
    cells = []
    for image, box in images:
        cell = drawing.display_image(image.pixels, CELL)
        cells += [cell, drawing.outline_boxes(cell, [box]), cell]
    return _stack(cells)


def read_last_strip(folder: Path, step: int) -> Image.Image | None:
    """Read the last strip drawn before a step, be it by this process or by the one that was resumed."""
    try:
        earlier = [strip for strip in list_strips(folder) if strip.step < step]
        return Image.open(earlier[-1].path).convert("RGB") if earlier else None
    except OSError:  # broken, or deleted meanwhile
        return None


def draw_strip(
    weights: Weights, images: Sequence[tuple[InputImage, Box]], previous: Image.Image | None = None
) -> Image.Image:
    """Return attention of `[CLS]`, attention of its query, and components of its patches, of each image.

    The components have the order and the signs that come nearest to the colors of the previous strip.
    """
    features = [analysis.patch_features(weights, image) for image, _ in images]
    basis = analysis.fit_basis(torch.cat(features))
    if previous is not None and previous.size == _strip_size(3 * len(images)):
        grids = [image.grid(weights.vit) for image, _ in images]
        basis = basis.aligned(torch.cat(features), np.concatenate(_component_colors(previous, grids)))
    cells = []
    for (image, box), patches in zip(images, features, strict=True):
        cell, memory = drawing.display_image(image.pixels, CELL), analysis.read_memory(weights, image)
        for crops in (None, image.crop(box, weights.vit.patch_size)[None]):
            maps, _ = analysis.attend(weights, image, memory, crops)
            cells.append(drawing.overlay_attention(cell, maps[0, 0]))
        cells.append(drawing.overlay_colors(cell, basis.colors(patches).reshape(*image.grid(weights.vit), 3)))
    return _stack(cells)


def _component_colors(strip: Image.Image, grids: Sequence[Grid]) -> list[Floats]:
    """Return the colors of the patches in a strip, N×3 of each image."""
    colors = []
    for number, (rows, columns) in enumerate(grids):
        top = (3 * number + 2) * (CELL + GAP)
        cell = strip.crop((0, top, CELL, top + CELL)).resize((columns, rows), Image.Resampling.BOX)
        colors.append(np.asarray(cell, np.float32).reshape(-1, 3) / np.float32(255))
    return colors


def _strip_size(cells: int) -> tuple[int, int]:
    return CELL, cells * (CELL + GAP) - GAP


def _stack(cells: Sequence[Image.Image]) -> Image.Image:
    strip = Image.new("RGB", _strip_size(len(cells)), "gray")  # visible on light and on dark pages
    for number, cell in enumerate(cells):
        strip.paste(cell, (0, number * (CELL + GAP)))
    return strip


def _save(path: Path, image: Image.Image) -> None:
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=88)
    write_atomically(path, buffer.getvalue(), durable=False)
