"""The settings of a distillation: those of pretraining that have a meaning there, and `distill`. Imports no torch.

They are a class of their own, so that the settings, hashes and directories of pretraining runs stay as they are. A
field with `exclude` keeps its fixed value: it is no setting here, is not accepted by name, and is not in settings.yaml.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from adclr.config.parsing import NonNegative, Section, Width, setting
from adclr.config.settings import Crops, Method, Model, Optim, Settings, Train, Views, advanced

VIT = "vit"  # the student that `model.` describes
DEFAULT_RECIPE = "distill_small"


def _fixed(value: Any) -> Any:
    """Return the field of a setting of pretraining that has this one value here."""
    return Field(value, exclude=True)


class DistillViews(Views):
    """Crops of an image: student and teacher see the same ones, and there are no queries."""

    num_local: Crops = setting(4, "local crops per image")
    num_queries: Crops = _fixed(0)
    query_scale: tuple[float, float] = _fixed((0.05, 0.15))
    query_photometric: Literal["none", "local"] = _fixed("none")
    query_source: Literal["random", "local"] = _fixed("random")


class DistillModel(Model):
    """The student, where it is a ViT of this program."""

    init: str | None = _fixed(None)
    drop_path: Annotated[float, Field(ge=0, lt=1)] = advanced(0.0, "drop path rate of the last block, linear in depth")


class DistillOptim(Optim):
    """AdamW and its schedules."""

    freeze_last_layer_epochs: NonNegative = _fixed(0)
    freeze_backbone_epochs: NonNegative | None = _fixed(None)


class DistillTrain(Train):
    """Length, batch size, device, checkpoints and logs."""

    shard: bool = _fixed(False)


class Distill(Section):
    """Teacher, student and loss of a distillation."""

    teacher: str = setting("", "weights of the teacher (TEACHER of the command line)", free=["resume"])
    teacher_fingerprint: str = advanced(
        "", "hash of the teacher's weights, set by the program; a resumed run must have the same"
    )
    student: str = setting(
        VIT,
        "vit: the ViT of model.*; timm:NAME: an untrained network of timm; MODULE:FUNCTION: the network that your "
        "function returns. model.* applies to vit only",
    )
    cls_weight: NonNegative = setting(1.0, "weight of the loss of the class token")
    patch_weight: NonNegative = setting(1.0, "weight of the loss of the patches; 0: only the class token")
    smooth_l1_weight: NonNegative = advanced(0.5, "weight of the smooth L1 loss beside the cosine loss")
    grid: Literal["student", "teacher"] = advanced(
        "student", "patch grid of the loss; features of the other network are resampled to it"
    )
    projector_hidden_dim: Width | None = advanced(
        None, "width of the projector's hidden layer; null: the projector is one linear layer"
    )

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if not re.fullmatch(rf"{VIT}|timm:[\w.]+|[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.student):
            raise ValueError(
                f"distill.student={self.student} is not known; write vit, timm:NAME such as timm:resnet50, or "
                "MODULE:FUNCTION of your own"
            )
        if not self.cls_weight and not self.patch_weight:
            raise ValueError("distill.cls_weight and distill.patch_weight are both 0; set one of them to 1")
        return self


class DistillSettings(Settings):
    """All settings of a distillation."""

    views: DistillViews = DistillViews()
    model: DistillModel = DistillModel()
    distill: Distill = Distill()
    method: Method = _fixed(Method(num_prototypes=2))
    optim: DistillOptim = DistillOptim()
    train: DistillTrain = DistillTrain()

    @property
    def command(self) -> str:
        """Return the command that trains with such settings."""
        return "distill"

    @property
    def student_is_vit(self) -> bool:
        """Return whether the student is the ViT of `model.`, not another network."""
        return self.distill.student == VIT

    @model_validator(mode="after")
    def _network(self) -> Self:
        if not self.student_is_vit and self.train.checkpoint_activations:
            raise ValueError(
                f"train.checkpoint_activations is for ViTs, and the student is {self.distill.student}; leave it out"
            )
        return self


def settings_class(values: Mapping[str, Any]) -> type[Settings]:
    """Return the class of stored settings: those of a distillation name `distill`."""
    return DistillSettings if any(name.partition(".")[0] == "distill" for name in map(str, values)) else Settings


def common_side(side: int, *patches: int) -> int:
    """Return the side of a crop nearest to `side`, in pixels, that is divisible by all of these patch sizes."""
    unit = math.lcm(*patches)
    return max(unit, round(side / unit) * unit)
