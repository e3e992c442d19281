"""Average precision of boxes and masks, as COCO measures it: by faster-coco-eval, whose numbers are pycocotools'."""

from __future__ import annotations

import contextlib
import io
from typing import Any, Literal

import numpy as np

from adclr.data.sets.coco import Instances, coco_masks

# the place of each among COCO's twelve numbers
PLACES = {"ap": 0, "ap50": 1, "ap75": 2, "ap_small": 3, "ap_medium": 4, "ap_large": 5, "ar100": 8}


def average_precision(
    instances: Instances, detections: list[dict[str, Any]], kind: Literal["box", "mask"]
) -> dict[str, Any]:
    """Percentages, KIND_ap and so on, None where there is nothing to measure, and KIND_ap of each class.

    Detections are as COCO's results: image_id, category_id, bbox, score, and for masks segmentation. A mask is small,
    medium or large by its own area; where a box is given too, COCO's program would take that of the box.
    """
    coco_masks()  # says so if it is not there
    from faster_coco_eval import COCO, COCOeval_faster

    numbers: dict[str, Any] = {}
    left_out = "bbox" if kind == "mask" else "segmentation"
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(instances.dataset())
        told = [{k: v for k, v in one.items() if k != left_out} for one in detections]
        found = truth.loadRes(told) if told else COCO(instances.dataset() | {"annotations": []})
        measure = COCOeval_faster(truth, found, iouType="bbox" if kind == "box" else "segm")
        measure.evaluate()
        measure.accumulate()
        measure.summarize()
    for name, place in PLACES.items():
        numbers[f"{kind}_{name}"] = _percent(measure.stats[place])
    precision = np.asarray(measure.eval["precision"])[:, :, :, 0, -1]  # thresholds, recalls, classes; of any area
    means = [precision[:, :, c][precision[:, :, c] > -1] for c in range(len(instances.classes))]
    each = [_percent(values.mean()) if values.size else None for values in means]
    return numbers | {f"{kind}_per_class": dict(zip(instances.classes, each, strict=True))}


def _percent(value: Any) -> float | None:
    return None if value < 0 else 100 * float(value)
