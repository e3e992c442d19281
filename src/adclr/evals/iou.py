"""From predicted pixels to numbers: mIoU, aAcc, mAcc and the table of classes, as mmsegmentation defines them.

IoU of a class is what is rightly it, of all that is it or was taken for it; its accuracy is that of all that is it.
Means are over classes that occur: of IoU those that are there or were predicted, of accuracy those that are there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adclr.config.sections import UserError
from adclr.data.sets.pixels import IGNORE
from adclr.system import distributed


class Tally:
    """Counts K×K, a row for each true class and a column for each predicted one, of all processes in the end."""

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.num_classes = num_classes
        self.counts = torch.zeros(num_classes**2, dtype=torch.int64, device=device)

    def add(self, predicted: Tensor, labels: Tensor) -> None:
        """Of any shape; labels that are `IGNORE` do not count."""
        places = labels.flatten().long() * self.num_classes + predicted.flatten()
        nowhere = self.num_classes**2
        places = torch.where(labels.flatten() == IGNORE, nowhere, places)
        self.counts += torch.bincount(places, minlength=nowhere + 1)[:nowhere]

    def matrix(self) -> Tensor:
        """On the CPU; all processes must ask."""
        return distributed.sum_(self.counts.clone()).view(self.num_classes, self.num_classes).cpu()


def scores(name: str, matrix: Tensor, classes: list[str]) -> dict[str, Any]:
    """Percentages, NAME_miou, NAME_aacc and NAME_macc, and `per_class` with IoU, accuracy and the share of pixels."""
    counts = matrix.double()
    right, true, predicted = counts.diag(), counts.sum(dim=1), counts.sum(dim=0)
    if not true.sum():
        raise UserError("no pixel that was scored has a label; see to the labels of the val images")
    iou, accuracy = 100 * right / (true + predicted - right), 100 * right / true  # nan where there is none of it
    share = 100 * true / true.sum()
    table = {
        label: {"iou": _known(iou[c]), "accuracy": _known(accuracy[c]), "pixels": share[c].item()}
        for c, label in enumerate(classes)
    }
    return {
        f"{name}_miou": iou.nanmean().item(),
        f"{name}_aacc": 100 * (right.sum() / true.sum()).item(),
        f"{name}_macc": accuracy.nanmean().item(),
        "per_class": table,
    }


def _known(value: Tensor) -> float | None:
    return None if value.isnan() else value.item()
