"""Scores of predicted classes: top-1, top-5, the accuracy of each class, and the confusion matrix as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from adclr.data.sets.classes import LabeledImages
from adclr.features.drawing import INK, PAPER, ColorBar, Tile, compose_sheet, viridis
from adclr.system import distributed, outputs
from adclr.system.files import write_atomically
from adclr.system.fonts import drawable_text

Counts = NDArray[np.int64]
MAX_DRAWN = 1000  # classes with a picture
MAX_COUNTED = 100  # classes with counts in the JSON file
MAX_NAMED = 64  # classes with names in the picture
SIDE = 960  # of the matrix, approximately, pixels
MAX_LETTERS = 24  # of a name
MAX_MARGIN = 320  # for names, pixels
LINE = 24  # height of axis titles, pixels
PERCENT_CELL, COUNT_CELL = 18, 64  # smallest cells with a percentage, and with a count below it, pixels


def accuracies(
    name: str, ranking: Tensor, labels: Tensor, classes: list[str], prefix: Path | None = None
) -> dict[str, Any]:
    """Return percentages of `ranking`, n×k classes from most to least likely; draw the picture to PREFIX.png.

    They are NAME_top1, NAME_top5, NAME_mean_class (the mean over classes, whatever their sizes) and `per_class`;
    `confusion` has a row for each true class and a column for each predicted one.
    """
    ranking, labels = ranking[:, :5].cpu(), labels.cpu()
    hits = ranking == labels.unsqueeze(1)
    totals = torch.bincount(labels, minlength=len(classes))
    correct = torch.bincount(labels[hits[:, 0]], minlength=len(classes))
    per_class = {classes[c]: 100 * correct[c].item() / totals[c].item() for c in totals.nonzero().flatten().tolist()}
    scores: dict[str, Any] = {
        f"{name}_top1": 100 * hits[:, 0].double().mean().item(),
        f"{name}_top5": 100 * hits.any(dim=1).double().mean().item(),
        f"{name}_mean_class": sum(per_class.values()) / len(per_class),
        "per_class": per_class,
    }
    if len(classes) <= MAX_DRAWN:
        counts = _confusion(ranking[:, 0], labels, len(classes))
        if len(classes) <= MAX_COUNTED:
            scores["confusion"] = counts.tolist()
        if prefix is not None and distributed.is_main():
            title = f"Confusion matrix, {name}: {scores[f'{name}_top1']:.1f} % of {len(labels)} images right"
            draw_confusion(prefix.with_name(prefix.name + ".png"), counts, classes, title)
    return scores


def count_images(labeled: LabeledImages, num_train: int, num_val: int) -> dict[str, float]:
    """Return the numbers of train and val images that were read, and that of unreadable images."""
    num_images = len(labeled.train.labels) + len(labeled.val.labels)
    counts = {"num_train": num_train, "num_val": num_val, "num_unreadable": num_images - num_train - num_val}
    return {name: float(count) for name, count in counts.items()}


def _confusion(predicted: Tensor, labels: Tensor, num_classes: int) -> Counts:
    """Return the number of images of each true class (row) that were predicted as each class (column)."""
    cells = labels * num_classes + predicted
    counts: Counts = torch.bincount(cells, minlength=num_classes**2).view(num_classes, num_classes).numpy()
    return counts


def draw_confusion(path: Path, counts: Counts, classes: list[str], title: str = "") -> None:
    """Write a PNG of the matrix: the share of a true class that was predicted as each class, by color and as a number.

    Cells show their percentage where it fits, and the number of images below it where both fit; empty cells show none.
    """
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    cell = max(1, SIDE // len(classes))
    texts, kind = _labels(classes)
    size = max(8, min(16, cell - 2)) if len(classes) <= MAX_NAMED else 12
    labels = {number: drawable_text(text, size) for number, text in texts.items()}
    names = min(MAX_MARGIN, max(int(font.getlength(text)) for text, font in labels.values())) + 8
    margin = LINE + names
    colors = viridis(shares)
    matrix = Image.fromarray(colors).resize((cell * len(classes),) * 2, Image.Resampling.NEAREST)
    _write_numbers(matrix, counts, shares, colors, cell)
    image = Image.new("RGB", (margin + matrix.width, margin + matrix.height), PAPER)
    image.paste(matrix, (margin, margin))
    pen = ImageDraw.Draw(image)
    columns = Image.new("RGB", (names, matrix.height), PAPER)  # the names of the columns, before the rotation
    side = ImageDraw.Draw(columns)
    for number, (label, font) in labels.items():
        middle = max(6, round((number + 0.5) * cell))  # where cells are small, half of the first label would be cut
        pen.text((margin - 4, margin + middle), label, fill=INK, font=font, anchor="rm")
        side.text((4, middle), label, fill=INK, font=font, anchor="lm")
    image.paste(columns.rotate(90, expand=True), (margin, LINE))
    for text, rotated in ((f"predicted {kind}", False), (f"true {kind}", True)):
        strip = Image.new("RGB", (matrix.width, LINE), PAPER)
        words = ImageFont.load_default(size=LINE - 6)
        ImageDraw.Draw(strip).text((strip.width // 2, LINE // 2), text, fill=INK, font=words, anchor="mm")
        image.paste(strip.rotate(90, expand=True) if rotated else strip, (0, margin) if rotated else (margin, 0))
    scale = ColorBar("0 %", "100 %", "of the images of the true class")
    write_atomically(path, outputs.encode_png(compose_sheet([[Tile(image, title)]], bar=scale, text=16), "evaluate"))


def _labels(classes: list[str]) -> tuple[dict[int, str], str]:
    """Return the labels of rows and columns by number, and the axis title; many classes have only some numbers."""
    if len(classes) <= MAX_NAMED:
        names = [name if len(name) <= MAX_LETTERS else name[: MAX_LETTERS - 2] + ".." for name in classes]
        return dict(enumerate(names)), "class"
    step = next(step for step in (10, 20, 50, 100) if len(classes) <= 20 * step)
    return {number: str(number) for number in range(0, len(classes), step)}, "class, by its number in order of names"


def _write_numbers(
    matrix: Image.Image, counts: Counts, shares: NDArray[np.float64], colors: NDArray[np.uint8], cell: int
) -> None:
    """Draw the percentage into each cell that is not empty, and the count below it if the cells are large enough."""
    if cell < PERCENT_CELL:
        return
    pen, large = ImageDraw.Draw(matrix), cell >= COUNT_CELL
    font = ImageFont.load_default(size=min(24, cell // 4 if large else cell // 2))
    for row, column in np.argwhere(counts):
        # black on bright cells, white on dark ones
        ink = INK if colors[row, column] @ (0.299, 0.587, 0.114) > 110 else PAPER
        text = f"{100 * shares[row, column]:.0f}" + (f" %\n({counts[row, column]})" if large else "")
        middle = (column + 0.5) * cell, (row + 0.5) * cell
        pen.multiline_text(middle, text, fill=ink, font=font, anchor="mm", align="center")
