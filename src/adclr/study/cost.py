"""Hours of the runs and evaluations of a study on one GPU, estimated from their settings. Reads no data.

Training: images of all epochs over the rate of the step that `adclr plan --gpu` estimates. Evaluations: seconds that
were measured on one H200 with ViT-S/16, in proportion to the images, to the operations of the backbone, and to the peak
speed of the GPU. Neither has start-up, nor time to wait for images that are slow to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from adclr.config.distillation import DistillSettings
from adclr.config.settings import Settings
from adclr.study.study_file import Cell, Evaluation, Study, data_name
from adclr.training import plan_cost, planning
from adclr.training.plan_gpus import GPUS, Gpu

MEASURED_GPU = GPUS["h200"]
# Seconds for each image that was read, and the side in pixels: of a forward pass where the backbone is frozen. From
# `seconds` in studies/results/runs (Imagenette, CamVid and Pets) and docs/dense.md; those of kNN are mostly decoding.
KNN_SECONDS, LINEAR_SECONDS, FINETUNE_SECONDS, CLASSIFICATION_SIDE = 8.8e-4, 1.03e-4, 3.9e-4, 224
INCONTEXT_SECONDS, INCONTEXT_SIDE = 4.7e-3, 352
SEGMENTATION_SECONDS = {"linear": 0.15 / 16, "fpn": 0.18 / 16, "upernet": 0.24 / 16}
SEGMENTATION_SIDE = 512
DETECTION_SECONDS, DETECTION_SIDE = 0.17 / 8, isqrt(800 * 1333)
DETECTION_BATCH = 32  # of the protocol
MATCHING_VIEWS = 2
ESTIMATED = ("knn", "linear", "finetune", "incontext", "matching", "segmentation", "detection")


@dataclass(frozen=True)
class CellCost:
    """Estimated hours of a run; None where they cannot be known."""

    training: float | None  # None: unknown number of images, trained on a CPU, or a distillation
    evaluations: Mapping[str, float | None]  # by title; 0 for a second score of the same evaluation


def count_images(study: Study, data: str) -> int | None:
    """Return the number of training images that the study names for data: of imagenette/train or of imagenette."""
    images = study.outline.images
    return images.get(data, images.get(data_name(data)))


def estimate_cell(study: Study, cell: Cell, gpu: Gpu) -> CellCost:
    """Return the hours of a run and of all its evaluations."""
    evaluations: dict[str, float | None] = {}
    keys: set[str] = set()
    for title, one in study.outline.evaluations.items():
        if one.data is not None:
            again = one.key in keys  # another score of an evaluation above
            hours = _evaluation_hours(one, cell.settings, count_images(study, one.data), gpu)
            evaluations[title] = 0.0 if again else hours
            keys.add(one.key)
    return CellCost(training_hours(study, cell, gpu), evaluations)


def training_hours(study: Study, cell: Cell, gpu: Gpu) -> float | None:
    """Return the hours of the steps of a run on one GPU, accumulated if the batch does not fit."""
    count, settings = count_images(study, cell.data), cell.settings
    if cell.untrained:
        return 0.0
    if count is None or settings.train.device == "cpu" or isinstance(settings, DistillSettings):
        return None  # of a distillation the cost depends on the teacher, whose weights may not be there yet
    batch = settings.train.batch_size
    steps = settings.train.epochs * (count // batch)
    device = planning.estimate_device(settings, plan_cost.describe_cost(settings), batch, 1, gpu, 0.0, steps)
    return steps * batch / device.images_per_second / 3600


def _evaluation_hours(evaluation: Evaluation, settings: Settings, count: int | None, gpu: Gpu) -> float | None:
    if evaluation.name not in ESTIMATED or count is None or settings.train.device == "cpu":
        return None
    return _evaluation_seconds(evaluation, settings, count, gpu) / 3600


def _evaluation_seconds(evaluation: Evaluation, settings: Settings, count: int, gpu: Gpu) -> float:
    """Return the seconds of an evaluation with `count` training images."""
    chosen: Any = evaluation.build("W", "D")
    side = settings.views.global_size

    def seconds(passes: int, each: float, size: int, measured_size: int) -> float:
        measured = plan_cost.image_flops(Settings(), measured_size)
        factor = plan_cost.image_flops(settings, size) / measured * MEASURED_GPU.tflops / gpu.tflops
        return float(passes) * each * factor

    if evaluation.name == "knn":
        return max(count * KNN_SECONDS, seconds(count, KNN_SECONDS, side, CLASSIFICATION_SIDE))
    if evaluation.name == "linear":
        epochs = 1 if chosen.quick else chosen.epochs
        return seconds(epochs * count, LINEAR_SECONDS, chosen.size or side, CLASSIFICATION_SIDE)
    if evaluation.name == "finetune":
        return seconds(chosen.epochs * count, FINETUNE_SECONDS, chosen.size or side, CLASSIFICATION_SIDE)
    if evaluation.name == "incontext":
        passes = count * max(1, chosen.augment_epochs)
        return seconds(passes, INCONTEXT_SECONDS, chosen.size, INCONTEXT_SIDE)
    if evaluation.name == "matching":
        passes = MATCHING_VIEWS * min(count, int(chosen.max_images))
        return max(passes * KNN_SECONDS, seconds(passes, KNN_SECONDS, side, CLASSIFICATION_SIDE))
    if chosen.minutes is not None:  # which small images use up, however fast the GPU is
        return 60.0 * float(chosen.minutes)
    if evaluation.name == "segmentation":
        from adclr.evals import segmentation  # imports torch

        protocol = segmentation.protocol_of(chosen)
        passes = protocol.steps * protocol.batch_size
        return seconds(passes, SEGMENTATION_SECONDS[chosen.head], chosen.size, SEGMENTATION_SIDE)
    passes = chosen.epochs * count
    if chosen.steps:
        passes = chosen.steps * (chosen.batch_size or DETECTION_BATCH)
    return seconds(passes, DETECTION_SECONDS, isqrt(chosen.sides[1] * _longer_side(chosen)), DETECTION_SIDE)


def _longer_side(settings: Any) -> int:
    """Return the longer side of the images that were measured, 800 x 1333, at another shorter side."""
    return min(int(settings.longest), int(settings.sides[1]) * 5 // 3)
