"""What every evaluation begins with: weights, labelled images and a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field

from adclr.config.sections import Device, Ratio, Section, UserError, setting
from adclr.data.draws import combine, key_of
from adclr.data.sets.classes import Labelled, open_labelled
from adclr.data.sets.pixels import IGNORE, Segmented, check, open_segmented
from adclr.system import distributed
from adclr.system.devices import choose
from adclr.weights.backbone import Weights, load_weights


class Conditions(Section):
    weights: str = setting("", "a run directory, a file or folder of weights, or timm:NAME", free=["resume", "study"])
    partial: bool = setting(False, "take weights that do not cover the whole backbone", free=["study", "control"])
    from_scratch: bool = setting(False, "the control: the same ViT, newly initialized", free=["study", "control"])
    seed: int = Field(0, ge=0, lt=2**63, description="of everything random")
    max_unreadable: Ratio = setting(
        0.1, "share of unreadable images above which nothing is scored", free=["resume", "study"]
    )
    num_workers: int | None = setting(
        None, "decoding threads; null: one for each CPU core", ge=1, free=["resume", "study", "control"]
    )
    device: Device = setting("auto", "auto: the GPU if there is one", free=["resume", "study", "control"])


class Task(Conditions):
    data: str = setting(
        "", "labeled folder: train/ and val/, or one that is split 80/20; or KIND:DIR", free=["resume", "study"]
    )


def begin(name: str, settings: Task) -> tuple[Weights, Labelled, torch.device]:
    """The weights lie on the device."""
    if not settings.weights or not settings.data:
        raise UserError(f"{name} needs both weights and labelled data; give --weights and --data")
    labelled = open_labelled(settings.data)
    device = choose(settings.device)
    return weights_of(settings, device), labelled, device


def weights_of(settings: Conditions, device: torch.device) -> Weights:
    weights = load_weights(settings.weights, settings.partial)
    if settings.from_scratch:
        torch.manual_seed(combine(settings.seed, key_of("initial weights")) % 2**63)
        weights = replace(weights, vit=weights.vit.like().eval())
    weights.vit.to(device)
    return weights


class Pixelwise(Conditions):
    data: str = setting("", "folder with images/, labels/ and classes.txt, or ADE20K's", free=["resume", "study"])
    train_split: str = Field("train", description="folder of images/ and labels/ that is learned from")
    val_split: str = setting("val", "and the one that is scored", free=["resume"])
    ignore: Annotated[int, Field(ge=0, lt=2**16)] = Field(IGNORE, description="value of labels that do not count")
    pictures: Annotated[int, Field(ge=0, le=64)] = setting(
        4, "val images whose prediction is drawn", free=["resume", "study"]
    )


def begin_pixelwise(name: str, settings: Pixelwise) -> tuple[Weights, Segmented, torch.device]:
    """The weights lie on the device, and every label has been looked at."""
    if not settings.weights or not settings.data:
        raise UserError(f"{name} needs both weights and labelled pixels; give --weights and --data")
    segmented = open_segmented(settings.data, settings.train_split, settings.val_split, settings.ignore)
    check(segmented, settings.num_workers, distributed.is_main())
    device = choose(settings.device)
    return weights_of(settings, device), segmented, device
