"""What evaluations on labelled pixels begin with: settings, weights, checked labels and a device."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from adclr.config.sections import UserError
from adclr.data.sets.pixels import IGNORE, Segmented, check, open_segmented
from adclr.evals.task import Conditions, weights_of
from adclr.system import distributed
from adclr.system.devices import choose
from adclr.weights.backbone import Weights


class Pixelwise(Conditions):
    data: str = Field("", description="folder with images/, labels/ and classes.txt, or ADE20K's")
    train_split: str = Field("train", description="folder of images/ and labels/ that is learned from")
    val_split: str = Field("val", description="and the one that is scored")
    ignore: Annotated[int, Field(ge=0, lt=2**16)] = Field(IGNORE, description="value of labels that do not count")
    pictures: Annotated[int, Field(ge=0, le=64)] = Field(4, description="val images whose prediction is drawn")


def begin(name: str, settings: Pixelwise) -> tuple[Weights, Segmented, torch.device]:
    """The weights lie on the device, and every label has been looked at."""
    if not settings.weights or not settings.data:
        raise UserError(f"{name} needs both weights and labelled pixels; give --weights and --data")
    segmented = open_segmented(settings.data, settings.train_split, settings.val_split, settings.ignore)
    check(segmented, settings.num_workers, distributed.is_main())
    device = choose(settings.device)
    return weights_of(settings, device), segmented, device
