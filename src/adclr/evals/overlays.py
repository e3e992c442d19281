"""A figure of predictions: some images, their labels and their predictions as colored overlays."""

from __future__ import annotations

import colorsys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from adclr.data.sets.pixels import IGNORE
from adclr.evals.frames import Frames
from adclr.features.drawing import spread_evenly
from adclr.system import distributed, outputs
from adclr.system.files import write_atomically
from adclr.system.fonts import drawable_text

HEIGHT, MARGIN, LINE, TEXT = 240, 6, 20, 13  # pixels
MAX_LEGEND = 24  # classes in the legend, those of the most pixels
OPACITY = 0.6  # of the colors over the image


def _palette(count: int) -> NDArray[np.uint8]:
    """Return colors that differ between neighboring numbers: hues by the golden ratio, in three lightnesses."""
    rgb = [colorsys.hsv_to_rgb(n * 0.61803 % 1, 0.9 - 0.25 * (n % 3), 1.0 - 0.2 * (n // 3 % 3)) for n in range(count)]
    return (np.array(rgb) * 255).round().astype(np.uint8)


def _overlay(image: NDArray[np.uint8], labels: NDArray[np.int64], colors: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the image with classes in color, height×width×3; ignored pixels are left as they are."""
    labeled = labels != IGNORE
    blended = image.astype(np.float64)
    blended[labeled] = (1 - OPACITY) * blended[labeled] + OPACITY * colors[labels[labeled]]
    return blended.round().astype(np.uint8)


def _to_rgb(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return height×width×3 of C×height×width; unless there are three channels, the first as gray."""
    return np.ascontiguousarray((image if len(image) == 3 else image[:1].repeat(3, axis=0)).transpose(1, 2, 0))


class Overlays:
    """Overlays of `count` of `total` images, evenly spaced, whichever process predicts them, for PREFIX.png.

    Without a prefix there are none. All processes must call `write`.
    """

    def __init__(self, classes: list[str], count: int, total: int, prefix: Path | None) -> None:
        self.indices = set(spread_evenly(total, 0 if prefix is None else count))
        self.prefix, self.classes, self.colors = prefix, classes, _palette(len(classes))
        self.rows: dict[int, NDArray[np.uint8]] = {}  # 3×HEIGHT×width×3 by index: image, labels, prediction
        self.num_pixels = np.zeros(len(classes), np.int64)  # of each class in all rows

    def add(self, frames: Frames, predicted: Tensor) -> None:
        """Draw those of the images that are in the figure."""
        for number, index in enumerate(frames.indices):
            if index in self.indices:
                image = _to_rgb(frames.images[number].cpu().numpy())
                maps = [labels[number].cpu().long().numpy() for labels in (frames.labels, predicted)]
                cells = [image, *(_overlay(image, labels, self.colors) for labels in maps)]
                self.rows[index] = np.stack([_resize_to_height(cell) for cell in cells])
                for labels in maps:
                    self.num_pixels += np.bincount(labels[labels != IGNORE], minlength=len(self.classes))

    def _gather(self) -> None:
        """Collect the rows of all processes."""
        sizes = torch.tensor([[index, row.shape[2]] for index, row in self.rows.items()], dtype=torch.int64).view(-1, 2)
        pixels = np.concatenate([np.zeros(0, np.uint8), *(row.ravel() for row in self.rows.values())])
        all_pixels, start = distributed.gather(torch.from_numpy(pixels)).numpy(), 0
        for index, width in distributed.gather(sizes).tolist():
            end = start + 3 * HEIGHT * width * 3
            self.rows[index] = all_pixels[start:end].reshape(3, HEIGHT, width, 3)
            start = end
        self.num_pixels = distributed.gather(torch.from_numpy(self.num_pixels)[None]).sum(dim=0).numpy()

    def write(self) -> None:
        """Write PREFIX.png: a row for each image, and a legend of the colors."""
        if self.prefix is None or not self.indices:  # the same in all processes
            return
        self._gather()
        if not self.rows or not distributed.is_main():
            return
        cells = [[Image.fromarray(cell) for cell in self.rows[index]] for index in sorted(self.rows)]
        legend = [int(c) for c in np.argsort(-self.num_pixels, kind="stable")[:MAX_LEGEND] if self.num_pixels[c]]
        width = max(sum(cell.width + MARGIN for cell in row) for row in cells) + MARGIN
        columns = max(1, width // 180)
        legend_height = LINE * -(-len(legend) // columns)
        sheet = Image.new("RGB", (width, LINE + len(cells) * (HEIGHT + MARGIN) + legend_height + MARGIN), "white")
        pen = ImageDraw.Draw(sheet)
        for row, line in enumerate(cells):
            left = MARGIN
            for title, cell in zip(("image", "labels", "predicted"), line, strict=True):
                if row == 0:
                    pen.text((left, 2), title, fill="black", font=drawable_text(title, TEXT).font)
                sheet.paste(cell, (left, LINE + row * (HEIGHT + MARGIN)))
                left += cell.width + MARGIN
        top = LINE + len(cells) * (HEIGHT + MARGIN)
        for number, label in enumerate(legend):
            x, y = MARGIN + number % columns * 180, top + number // columns * LINE
            pen.rectangle((x, y + 3, x + 12, y + 15), fill=tuple(self.colors[label].tolist()))
            name, font = drawable_text(self.classes[label], TEXT)
            pen.text((x + 18, y + 2), name[:22], fill="black", font=font)
        write_atomically(self.prefix.with_name(self.prefix.name + ".png"), outputs.encode_png(sheet, "evaluate"))


def _resize_to_height(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Resize an image to the height of a row."""
    height, width = pixels.shape[:2]
    return np.asarray(Image.fromarray(pixels).resize((max(1, round(width * HEIGHT / height)), HEIGHT)))
