"""Pictures of predictions: a few images, what is there, and what was said to be there."""

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
from adclr.features.pictures import spread
from adclr.system import distributed, outputs
from adclr.system.files import write_atomically
from adclr.system.fonts import lettering

HEIGHT, MARGIN, LINE, TEXT = 240, 6, 20, 13  # pixels
NAMED = 24  # classes that the legend names, those that cover most
OPAQUE = 0.6  # of the colours over the image


def palette(count: int) -> NDArray[np.uint8]:
    """Colours that neighbours in number do not share: hues by the golden ratio, in three lightnesses."""
    made = [colorsys.hsv_to_rgb(n * 0.61803 % 1, 0.9 - 0.25 * (n % 3), 1.0 - 0.2 * (n // 3 % 3)) for n in range(count)]
    return (np.array(made) * 255).round().astype(np.uint8)


def painted(image: NDArray[np.uint8], labels: NDArray[np.int64], colours: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """height×width×3: classes in colour over the image; what is ignored stays as it is."""
    known = labels != IGNORE
    over = image.astype(np.float64)
    over[known] = (1 - OPAQUE) * over[known] + OPAQUE * colours[labels[known]]
    return over.round().astype(np.uint8)


def to_rgb(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """C×height×width -> height×width×3; of other channels than three the first as grey."""
    return np.ascontiguousarray((image if len(image) == 3 else image[:1].repeat(3, axis=0)).transpose(1, 2, 0))


class Pictures:
    """Pictures of some images that are spread over all, whichever process tests them; all processes must `write`."""

    def __init__(self, classes: list[str], count: int, total: int) -> None:
        self.wanted = set(spread(total, count))
        self.classes, self.colours = classes, palette(len(classes))
        self.rows: dict[int, NDArray[np.uint8]] = {}  # 3×HEIGHT×width×3 by index: image, labels, prediction
        self.seen = np.zeros(len(classes), np.int64)  # pixels of each class in them

    def add(self, frames: Frames, predicted: Tensor) -> None:
        for place, index in enumerate(frames.indices):
            if index in self.wanted:
                image = to_rgb(frames.images[place].cpu().numpy())
                maps = [labels[place].cpu().long().numpy() for labels in (frames.labels, predicted)]
                cells = [image, *(painted(image, labels, self.colours) for labels in maps)]
                self.rows[index] = np.stack([_shrunk(cell) for cell in cells])
                for labels in maps:
                    self.seen += np.bincount(labels[labels != IGNORE], minlength=len(self.classes))

    def _gather(self) -> None:
        """Brings together what the processes have."""
        sizes = torch.tensor([[index, row.shape[2]] for index, row in self.rows.items()], dtype=torch.int64).view(-1, 2)
        pixels = np.concatenate([np.zeros(0, np.uint8), *(row.ravel() for row in self.rows.values())])
        everything, start = distributed.gather(torch.from_numpy(pixels)).numpy(), 0
        for index, width in distributed.gather(sizes).tolist():
            end = start + 3 * HEIGHT * width * 3
            self.rows[index] = everything[start:end].reshape(3, HEIGHT, width, 3)
            start = end
        self.seen = distributed.gather(torch.from_numpy(self.seen)[None]).sum(dim=0).numpy()

    def write(self, place: Path) -> None:
        """PLACE.png: a row for each image, and which colour is which class."""
        if not self.wanted:  # the same in all processes
            return
        self._gather()
        if not self.rows or not distributed.is_main():
            return
        cells = [[Image.fromarray(cell) for cell in self.rows[index]] for index in sorted(self.rows)]
        named = [int(c) for c in np.argsort(-self.seen, kind="stable")[:NAMED] if self.seen[c]]
        width = max(sum(cell.width + MARGIN for cell in row) for row in cells) + MARGIN
        columns = max(1, width // 180)
        legend = LINE * -(-len(named) // columns)
        sheet = Image.new("RGB", (width, LINE + len(cells) * (HEIGHT + MARGIN) + legend + MARGIN), "white")
        pen = ImageDraw.Draw(sheet)
        for row, line in enumerate(cells):
            left = MARGIN
            for title, cell in zip(("image", "labels", "predicted"), line, strict=True):
                if row == 0:
                    pen.text((left, 2), title, fill="black", font=lettering(title, TEXT).font)
                sheet.paste(cell, (left, LINE + row * (HEIGHT + MARGIN)))
                left += cell.width + MARGIN
        top = LINE + len(cells) * (HEIGHT + MARGIN)
        for number, label in enumerate(named):
            x, y = MARGIN + number % columns * 180, top + number // columns * LINE
            pen.rectangle((x, y + 3, x + 12, y + 15), fill=tuple(self.colours[label].tolist()))
            name, font = lettering(self.classes[label], TEXT)
            pen.text((x + 18, y + 2), name[:22], fill="black", font=font)
        save_png(sheet, place)


def _shrunk(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width = pixels.shape[:2]
    return np.asarray(Image.fromarray(pixels).resize((max(1, round(width * HEIGHT / height)), HEIGHT)))


def save_png(sheet: Image.Image, place: Path) -> None:
    write_atomically(place.with_name(place.name + ".png"), outputs.png(sheet, "evaluate"))
