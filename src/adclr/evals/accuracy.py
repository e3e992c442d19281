"""From predictions to numbers: top-1, top-5, each class on its own, and who is taken for whom, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from adclr import distributed, outputs
from adclr.fonts import lettering
from adclr.pictures import viridis
from adclr.runs import write_atomically

Counts = NDArray[np.int64]
DRAWN = 1000  # classes up to which there is a picture
TOLD = 100  # classes up to which its counts are given as numbers too
NAMED = 64  # classes up to which the picture has names
SIDE = 960  # pixels of the picture's matrix, about
LETTERS = 24  # of a name that are drawn
MARGIN = 320  # pixels at most for names


def accuracies(
    name: str, ranking: Tensor, labels: Tensor, classes: list[str], place: Path | None = None
) -> dict[str, Any]:
    """Percentages of `ranking`, n×k classes from most to least likely; the picture goes to PLACE.png.

    NAME_top1, NAME_top5 and NAME_mean_class (the mean over classes, whatever their sizes), and `per_class`; `confusion`
    has a row for each true class and a column for each predicted one.
    """
    ranking, labels = ranking[:, :5].cpu(), labels.cpu()
    hits = ranking == labels.unsqueeze(1)
    images = torch.bincount(labels, minlength=len(classes))
    right = torch.bincount(labels[hits[:, 0]], minlength=len(classes))
    per_class = {classes[c]: 100 * right[c].item() / images[c].item() for c in images.nonzero().flatten().tolist()}
    found: dict[str, Any] = {
        f"{name}_top1": 100 * hits[:, 0].double().mean().item(),
        f"{name}_top5": 100 * hits.any(dim=1).double().mean().item(),
        f"{name}_mean_class": sum(per_class.values()) / len(per_class),
        "per_class": per_class,
    }
    if len(classes) <= DRAWN:
        counts = confusion(ranking[:, 0], labels, len(classes))
        if len(classes) <= TOLD:
            found["confusion"] = counts.tolist()
        if place is not None and distributed.is_main():
            draw(place.with_name(place.name + ".png"), counts, classes)
    return found


def confusion(predicted: Tensor, labels: Tensor, num_classes: int) -> Counts:
    """How many images of the class of the row were taken for the class of the column."""
    places = labels * num_classes + predicted
    counts: Counts = torch.bincount(places, minlength=num_classes**2).view(num_classes, num_classes).numpy()
    return counts


def draw(path: Path, counts: Counts, classes: list[str]) -> None:
    """A PNG: each row is a class, and the brighter a cell, the more of its images were taken for the column's."""
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    cell = max(1, SIDE // len(classes))
    matrix = Image.fromarray(viridis(shares)).resize((cell * len(classes),) * 2, Image.Resampling.NEAREST)
    short = (name if len(name) <= LETTERS else name[: LETTERS - 1] + "…" for name in classes)
    names = [lettering(name, max(8, min(16, cell - 2))) for name in short]
    margin = 8
    if len(classes) <= NAMED:
        margin += min(MARGIN, max(int(font.getlength(name)) for name, font in names))
    sheet = Image.new("RGB", (matrix.width + margin + 8, matrix.height + margin + 8), "white")
    sheet.paste(matrix, (margin, margin))
    if len(classes) <= NAMED:
        pen = ImageDraw.Draw(sheet)
        across = Image.new("RGB", (margin, matrix.height), "white")  # the names of the columns, before they are turned
        side = ImageDraw.Draw(across)
        for number, (name, font) in enumerate(names):
            middle = round((number + 0.5) * cell)
            pen.text((margin - 4, margin + middle), name, fill="black", font=font, anchor="rm")
            side.text((4, middle), name, fill="black", font=font, anchor="lm")
        sheet.paste(across.rotate(90, expand=True), (margin, 0))
    write_atomically(path, outputs.png(sheet, "evaluate"))
