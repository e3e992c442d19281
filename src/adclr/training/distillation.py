"""Distillation: the teacher, the settings that it determines, and what is measured of the student meanwhile.

`model.distillation` is the loss; steps, checkpoints and logs are those of pretraining (`training.loop`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adclr.config.distillation import VIT, DistillSettings, common_side
from adclr.config.parsing import UserError
from adclr.data.random_draws import combine, key_of
from adclr.model.distillation import Backbone, Distillation, Projector, Student, Teacher
from adclr.model.effective_rank import deviation, effective_rank
from adclr.model.feature_network import FeatureNetwork
from adclr.model.named_tensors import Views
from adclr.model.vit import VisionTransformer
from adclr.report.health import Measures
from adclr.training.methods import copy_student
from adclr.weights.backbone import Weights, architecture, load_weights
from adclr.weights.networks import build_network

NUM_IMAGES = 64  # measured, as in pretraining
# settings that the teacher determines: student and teacher see the same crops
FROM_TEACHER = ("data.mean", "data.std", "data.max_value", "model.num_channels")


def adopt_teacher(
    values: Mapping[str, Any], user: Mapping[str, Any], stored: DistillSettings | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that the teacher determines and the user does not set, by full name, and the reasons.

    `values` are all settings by full name, `user` those of the command line, `stored` those of a run that is resumed.
    """
    teacher = values.get("distill.teacher")
    if not teacher:
        raise UserError("no teacher was named; write adclr distill TEACHER DATA --out RUN")
    _check_function(values, user)
    weights = _load_teacher(os.fspath(teacher))
    vit, fingerprint = weights.vit, weights.fingerprint()
    expected = values.get("distill.teacher_fingerprint") if stored is None else stored.distill.teacher_fingerprint
    if expected and expected != fingerprint:
        raise UserError(
            f"{teacher} is not the teacher that the run began with, its weights differ; name that one or choose "
            "another --out"
        )
    adopted: dict[str, Any] = {"distill.teacher_fingerprint": fingerprint}
    of_teacher = weights.mean, weights.std, weights.max_value, vit.num_channels
    for path, value in zip(FROM_TEACHER, of_teacher, strict=True):
        if path in user and _plain(user[path]) != _plain(value):
            raise UserError(
                f"{path}={user[path]} is not the teacher's, {_plain(value)}, and both see the same crops; leave it out"
            )
        adopted[path] = value
    reasons = [f"the teacher is {teacher}: width {vit.dim}, {vit.depth} blocks, patches of {vit.patch_size}"]
    for path in ("views.global_size", "views.local_size")[: 2 if values["views.num_local"] else 1]:
        size, patch = values[path], values["model.patch_size"]
        if not isinstance(size, int) or not isinstance(patch, int) or size % vit.patch_size == 0:
            continue  # values of another type are refused elsewhere
        fits = common_side(size, patch, vit.patch_size)
        if path in user:
            raise UserError(
                f"{path}={size} is not divisible by the teacher's patches of {vit.patch_size} pixels; set {path}={fits}"
            )
        adopted[path] = fits
        reasons.append(
            f"{path}={fits} instead of {size}: divisible by the patches of the teacher, {vit.patch_size}, and of the "
            f"student, {patch} pixels"
        )
    return adopted, reasons


def _check_function(values: Mapping[str, Any], user: Mapping[str, Any]) -> None:
    """Refuse to call a function that a file names: settings are data."""
    student = str(values.get("distill.student") or VIT)
    is_function = student != VIT and not student.startswith("timm:")
    if is_function and user.get("distill.student") != student:
        raise UserError(
            f"the student is the network of a function, which is called only if you name it; add "
            f"distill.student={student} if you trust it"
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _load_teacher(teacher: str, input_size: int | None = None, show: bool = True) -> Weights:
    return load_weights(teacher, partial=None, input_size=input_size, show=show)


def build(settings: DistillSettings) -> Distillation:
    """Return the method that settings describe: a new student, its weights drawn from the seed, and the teacher."""
    # positions are stored for the global crops, so that they are not resampled in every step
    return assemble(settings, _load_teacher(settings.distill.teacher, settings.views.global_size, show=False).vit)


def assemble(settings: DistillSettings, teacher: VisionTransformer) -> Distillation:
    """Return the method of a teacher that is loaded."""
    torch.manual_seed(combine(settings.train.seed, key_of("initial weights")) % 2**63)
    distill = settings.distill
    backbone = _build_student(settings)
    patch_dim = backbone.map_dim if isinstance(backbone, FeatureNetwork) else backbone.dim
    head = Projector(backbone.dim, patch_dim, teacher.dim, distill.projector_hidden_dim)
    if isinstance(backbone, VisionTransformer):
        backbone.float32_residual = settings.train.residual_precision == "float32"
        if settings.train.checkpoint_activations:
            backbone.checkpoint_blocks()
    method = Distillation(
        Student(backbone, head),
        Teacher(teacher),
        cls_weight=distill.cls_weight,
        patch_weight=distill.patch_weight,
        smooth_l1_weight=distill.smooth_l1_weight,
        grid=distill.grid,
    )
    method.parallel_teacher = settings.train.parallel_teacher
    return method


def _build_student(settings: DistillSettings) -> Backbone:
    if settings.student_is_vit:
        return architecture(settings).build(settings.model.drop_path)
    side, views = settings.views.global_size, settings.views
    network = build_network(settings.distill.student, (side, side), settings.model.num_channels)
    if views.num_local:
        try:
            network.grid_of(views.local_size, views.local_size)
        except Exception:  # of someone else's code: the crop is too small, or of another size than it takes
            raise UserError(
                f"the student {settings.distill.student} cannot take crops of {views.local_size} pixels; raise "
                "views.local_size, or set views.num_local=0"
            ) from None
    return network


@torch.no_grad()
def measure_student(method: Distillation, views: Views, dtype: torch.dtype | None) -> Measures:
    """Measure student and teacher on the global crops of the first images; waits for the device."""
    crops, student = views.global_crops[:, :NUM_IMAGES], copy_student(method)
    count = crops.shape[1]
    images = crops.flatten(0, 1)
    with torch.autocast(images.device.type, dtype=dtype, enabled=dtype is not None):
        ours, theirs = student.backbone(images), method.teacher.backbone(images)
        parts = *method.cls_loss(ours, theirs), *method.patch_loss(ours, theirs, images)
    measures: dict[str, Tensor] = {"agreement_cls": parts[1], "agreement_patches": parts[3]}
    for name, tokens in (("", ours), ("teacher_", theirs)):
        for kind, rows in (("cls", tokens.cls), ("patches", tokens.patches.flatten(0, 1))):
            rows = rows.float().nan_to_num()
            measures[f"{name}rank_{kind}"] = effective_rank(rows)
            measures[f"{name}deviation_{kind}"] = deviation(rows)
    if count > 2:  # one image of two is always the other's neighbor
        neighbors = [_nearest(tokens.cls[:count]) for tokens in (ours, theirs)]
        measures["neighbors_shared"] = (neighbors[0] == neighbors[1]).float().mean()
    numbers = torch.stack([value.float().nan_to_num() for value in measures.values()]).tolist()
    return dict(zip(measures, numbers, strict=True))


def _nearest(features: Tensor) -> Tensor:
    """Return the index of the most similar other row of each row, by cosine."""
    rows = F.normalize(features.float().nan_to_num(), dim=-1)
    return (rows @ rows.T).fill_diagonal_(-torch.inf).argmax(dim=1)


def origin(settings: DistillSettings) -> dict[str, str]:
    """Return what provenance.json says of the teacher."""
    teacher = settings.distill.teacher
    path = Path(teacher)
    name = str(path.resolve()) if path.exists() else teacher
    return {"weights": name, "fingerprint": settings.distill.teacher_fingerprint}
