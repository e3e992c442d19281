"""The methods that one loop trains, pretraining and distillation, and what differs between them."""

from __future__ import annotations

import copy

from torch import nn

from adclr.model.distillation import Distillation, Student
from adclr.model.feature_network import FeatureNetwork
from adclr.model.method import ADCLR, Branch
from adclr.model.vit import VisionTransformer
from adclr.training.meter import DISTILLATION_NAMES, LOSS_NAMES

Method = ADCLR | Distillation


def loss_names(method: Method) -> tuple[str, ...]:
    """Return the names of a method's losses, in their order."""
    return DISTILLATION_NAMES if isinstance(method, Distillation) else LOSS_NAMES


def saved_modules(method: Method) -> dict[str, nn.Module]:
    """Return what a checkpoint holds of a method; the teacher of a distillation does not change."""
    if isinstance(method, Distillation):
        return {"student": method.student}
    return {"student": method.student, "teacher": method.teacher, "centers": method.centers}


def evaluated(method: Method) -> Branch | Student:
    """Return what is scored and exported: the teacher, or of a distillation a copy of the student."""
    return copy_student(method) if isinstance(method, Distillation) else method.teacher


def copy_student(method: Distillation) -> Student:
    """Return a copy of the student in evaluation mode."""
    return copy.deepcopy(method.student).eval().requires_grad_(False)


def vits(method: Method) -> list[VisionTransformer]:
    """Return the ViTs of a method, whose blocks are compiled, the student first."""
    backbones = method.student.backbone, method.teacher.backbone
    return [backbone for backbone in backbones if not isinstance(backbone, FeatureNetwork)]
