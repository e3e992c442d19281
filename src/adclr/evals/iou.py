"""Scores of predicted pixels: mIoU, aAcc, mAcc and a table of classes, as mmsegmentation defines them.

The accuracy of a class is the share of its pixels that were predicted as it. The mean of the accuracies is over the
classes that are in the labels, that of the IoU over those that are in the labels or in the predictions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adclr.config.parsing import UserError
from adclr.data.sets.pixels import IGNORE
from adclr.system import distributed


class Confusion:
    """The confusion matrix K×K of pixels, a row for each true class and a column for each predicted one."""

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.num_classes = num_classes
        self.counts = torch.zeros(num_classes**2, dtype=torch.int64, device=device)

    def add(self, predicted: Tensor, labels: Tensor) -> None:
        """Count predictions and labels of any shape; labels that are `IGNORE` do not count."""
        cells, num_cells = labels.flatten().long() * self.num_classes + predicted.flatten(), self.num_classes**2
        cells = torch.where(labels.flatten() == IGNORE, num_cells, cells)
        self.counts += torch.bincount(cells, minlength=num_cells + 1)[:num_cells]

    def matrix(self) -> Tensor:
        """Return the counts of all processes, which must all call it, on the CPU."""
        return distributed.all_reduce_sum(self.counts.clone()).view(self.num_classes, self.num_classes).cpu()


def scores(name: str, matrix: Tensor, classes: list[str]) -> dict[str, Any]:
    """Return percentages: NAME_miou, NAME_aacc, NAME_macc, and `per_class` with IoU, accuracy and share of pixels."""
    counts = matrix.double()
    correct, true, predicted = counts.diag(), counts.sum(dim=1), counts.sum(dim=0)
    if not true.sum():
        raise UserError("no pixel that was scored has a label; check the labels of the val images")
    iou, accuracy = 100 * correct / (true + predicted - correct), 100 * correct / true  # nan where there are no pixels
    share = 100 * true / true.sum()
    table = {
        label: {"iou": _nan_to_none(iou[c]), "accuracy": _nan_to_none(accuracy[c]), "pixels": share[c].item()}
        for c, label in enumerate(classes)
    }
    return {
        f"{name}_miou": iou.nanmean().item(),
        f"{name}_aacc": 100 * (correct.sum() / true.sum()).item(),
        f"{name}_macc": accuracy.nanmean().item(),
        "per_class": table,
    }


def _nan_to_none(value: Tensor) -> float | None:
    """Return a number, None for nan, which JSON does not have."""
    return None if value.isnan() else value.item()
