"""Distillation: a student learns the class token and the patches of a frozen teacher on the same crops.

It has the shape of `method.ADCLR`, so that the same step, loop and checkpoints train it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adclr.model.feature_network import FeatureNetwork
from adclr.model.named_tensors import Input, Tokens, Views
from adclr.model.ops import streams
from adclr.model.vit import VisionTransformer

Grid = tuple[int, int]
Backbone = VisionTransformer | FeatureNetwork


class DistillationLosses(NamedTuple):
    """Scalars of one batch; only `total` has a gradient that is used."""

    total: Tensor
    cls: Tensor
    patches: Tensor
    cosine_cls: Tensor  # mean cosine of the student's projected class tokens with the teacher's
    cosine_patches: Tensor


class Projector(nn.Module):
    """Maps the student's features to the width of the teacher's; thrown away after training."""

    def __init__(self, cls_dim: int, patch_dim: int, teacher_dim: int, hidden_dim: int | None = None) -> None:
        super().__init__()
        self.cls = _projection(cls_dim, teacher_dim, hidden_dim)
        self.patches = _projection(patch_dim, teacher_dim, hidden_dim)


def _projection(dim: int, target: int, hidden: int | None) -> nn.Module:
    """Return one linear layer, or two with GELU between them."""
    if hidden is None:
        layers: nn.Module = nn.Linear(dim, target)
    else:
        layers = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, target))
    for layer in layers.modules():
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
    return layers


class Student(nn.Module):
    """The backbone that is trained, with its projector."""

    def __init__(self, backbone: Backbone, head: Projector) -> None:
        super().__init__()
        self.backbone: Backbone = backbone
        self.head = head


class Teacher(nn.Module):
    """The frozen backbone; it is in no checkpoint."""

    def __init__(self, backbone: VisionTransformer) -> None:
        super().__init__()
        self.backbone = backbone
        self.requires_grad_(False)


class Distillation(nn.Module):
    """One step is `losses = method(views)`, backward, optimizer, `method.update(momentum, ok)`.

    With student features s, projected, and teacher features t of one token, both scaled to length √D of the teacher's
    width D, the loss is 1 - cos(s, t) + beta · smooth_l1(s, t), a mean over the D numbers. The loss of the class token
    is the mean over images and crops, that of the patches the mean over images, positions and crops; every crop counts
    the same.
    """

    def __init__(
        self,
        student: Student,
        teacher: Teacher,
        *,
        cls_weight: float = 1.0,
        patch_weight: float = 1.0,
        smooth_l1_weight: float = 0.5,
        grid: Literal["student", "teacher"] = "student",
    ) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        self.cls_weight, self.patch_weight, self.smooth_l1_weight = cls_weight, patch_weight, smooth_l1_weight
        self.grid = grid
        self.parallel_teacher = False  # on a GPU: beside the student
        self._statistics: list[Tensor] | None = None  # the student's buffers before the step, while a step runs
        self.train()

    def train(self, mode: bool = True) -> Distillation:
        """Set the student's mode; the teacher stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, views: Views, temperature: float | Tensor = 0.0, *_: object) -> DistillationLosses:
        """Return the losses of a batch. The temperatures of other methods have no meaning here.

        But one that is not a number makes the loss that too: so a step is recorded without an effect.
        """
        self._remember_statistics()
        crops = [t.flatten(0, 1) for t in (views.global_crops, views.local_crops) if t is not None]
        device = views.global_crops.device if self.parallel_teacher else None
        targets, outputs = streams.beside(self.teacher_tokens, self._student_tokens, crops, device)
        shares = [len(images) / sum(map(len, crops)) for images in crops]
        parts = [
            torch.stack([*self.cls_loss(output, target), *self.patch_loss(output, target, images)]) * share
            for images, output, target, share in zip(crops, outputs, targets, shares, strict=True)
        ]
        cls, cosine_cls, patches, cosine_patches = torch.stack(parts).sum(dim=0).unbind()
        total = self.cls_weight * cls + self.patch_weight * patches + 0 * temperature
        return DistillationLosses(total, cls, patches, cosine_cls, cosine_patches)

    def _student_tokens(self, crops: list[Tensor]) -> list[Tokens]:
        return self.student.backbone.forward_many([Input(images) for images in crops])

    @torch.no_grad()
    def teacher_tokens(self, crops: list[Tensor]) -> list[Tokens]:
        """Return the teacher's tokens of crops of several sizes."""
        return self.teacher.backbone.forward_many([Input(images) for images in crops])

    def cls_loss(self, output: Tokens, target: Tokens) -> tuple[Tensor, Tensor]:
        """Return the loss of class tokens, and their mean cosine."""
        return feature_loss(self.student.head.cls(output.cls), target.cls, self.smooth_l1_weight)

    def patch_loss(self, output: Tokens, target: Tokens, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of the patches of images, and their mean cosine."""
        height, width = images.shape[-2:]
        ours, theirs = self.student.backbone.grid_of(height, width), self.teacher.backbone.grid_of(height, width)
        student, teacher = self.student.head.patches(output.patches), target.patches
        if self.grid == "student":
            teacher = resample(teacher, theirs, ours)
        else:
            student = resample(student, ours, theirs)
        return feature_loss(student, teacher, self.smooth_l1_weight)

    # -- after the step --

    def _remember_statistics(self) -> None:
        """Copy the student's buffers, such as the running statistics of batch norm, before the first micro-batch."""
        if self._statistics is None:
            self._statistics = [buffer.clone() for buffer in self.student.buffers()]

    def forget(self) -> None:
        """Reset gradients and buffers, as if no batch had come since the last update."""
        self.zero_grad(set_to_none=True)
        if self._statistics is not None:
            with torch.no_grad():
                for buffer, before in zip(self.student.buffers(), self._statistics, strict=True):
                    buffer.copy_(before)
        self._statistics = None

    @torch.no_grad()
    def update(self, momentum: float | Tensor, ok: Tensor, head_only: bool = False) -> None:  # noqa: ARG002
        """Take back what a step that is not `ok` did to the student's buffers; there is no moving average."""
        assert self._statistics is not None, "a step begins with a batch"
        for buffer, before in zip(self.student.buffers(), self._statistics, strict=True):
            buffer.copy_(torch.where(ok, buffer, before))
        self._statistics = None


def feature_loss(student: Tensor, teacher: Tensor, smooth_l1_weight: float) -> tuple[Tensor, Tensor]:
    """Return the loss of features ...×D, and their mean cosine, both as means over all but D and in float32."""
    with torch.autocast(student.device.type, enabled=False):
        a, b = F.normalize(student.float(), dim=-1), F.normalize(teacher.float(), dim=-1)
        cosine = (a * b).sum(dim=-1).mean()
        scale = a.shape[-1] ** 0.5  # so that numbers are about 1, where smooth L1 changes from square to linear
        return 1 - cosine + smooth_l1_weight * F.smooth_l1_loss(a * scale, b * scale), cosine.detach()


def resample(features: Tensor, grid: Grid, target: Grid) -> Tensor:
    """B×N×D -> B×M×D: features on a grid, resampled to another by a bilinear filter with antialiasing."""
    if grid == target:
        return features
    matrix = _grid_matrix(grid, target, features.device)
    with torch.autocast(features.device.type, enabled=False):
        return matrix @ features.float()


@lru_cache(maxsize=32)
def _grid_matrix(grid: Grid, target: Grid, device: torch.device) -> Tensor:
    """Return the M×N matrix that resamples a grid: on a GPU the gradient of `F.interpolate` is not deterministic."""
    with torch.no_grad(), torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        basis = torch.eye(grid[0] * grid[1]).view(-1, 1, *grid)
        resampled = F.interpolate(basis, size=target, mode="bilinear", antialias=True)
        return resampled.view(len(basis), -1).T.contiguous().to(device)
