"""The inputs that evaluations share: settings, labeled data, the backbone on its device, and its image size."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field

from adclr.config.parsing import Device, Ratio, Section, UserError, setting
from adclr.data.random_draws import combine, key_of
from adclr.data.sets.classes import LabeledImages, open_labeled
from adclr.data.sets.pixels import IGNORE, Segmented, check, open_segmented
from adclr.model.vit import VisionTransformer
from adclr.system import distributed
from adclr.system.devices import select_device
from adclr.weights.backbone import Weights, load_weights
from adclr.weights.networks import rebuild_network


class EvaluationSettings(Section):
    """Settings of every evaluation."""

    weights: str = setting(
        "", description="a run directory, a file or folder of weights, or timm:NAME", free=["resume", "study"]
    )
    partial: bool = setting(
        False, description="accept weights that lack parts of the backbone", free=["study", "control"]
    )
    from_scratch: bool = setting(
        False, description="score the same ViT untrained, as a control", free=["study", "control"]
    )
    seed: int = Field(0, ge=0, lt=2**63, description="random seed")
    max_unreadable: Ratio = setting(
        0.1, description="share of unreadable images above which the evaluation stops", free=["resume", "study"]
    )
    num_workers: int | None = setting(
        None, ge=1, description="decoding threads; null: one per CPU core", free=["resume", "study", "control"]
    )
    device: Device = setting("auto", "auto: the GPU if there is one", free=["resume", "study", "control"])


class ClassificationSettings(EvaluationSettings):
    """Settings of evaluations on labeled images."""

    data: str = setting(
        "",
        description="labeled images: train/ and val/, or one folder that is split 80/20; or KIND:DIR",
        free=["resume", "study"],
    )


class PixelSettings(EvaluationSettings):
    """Settings of evaluations on labeled pixels."""

    data: str = setting(
        "", description="folder with images/, labels/ and classes.txt, or that of ADE20K", free=["resume", "study"]
    )
    train_split: str = Field("train", description="train split: its folder in images/ and labels/")
    val_split: str = setting("val", "split to score: its folder in images/ and labels/", free=["resume"])
    ignore: Annotated[int, Field(ge=0, lt=2**16)] = Field(IGNORE, description="label value of pixels to ignore")
    pictures: Annotated[int, Field(ge=0, le=64)] = setting(
        4, description="number of val images whose prediction is drawn", free=["resume", "study"]
    )


def check_inputs(name: str, settings: Any, data: str) -> None:
    """Refuse settings without weights or data; `data` names the kind of data."""
    if not settings.weights or not settings.data:
        raise UserError(f"{name} needs both weights and {data}; give --weights and --data")


def open_classification(
    name: str, settings: ClassificationSettings, networks: bool = False
) -> tuple[Weights, LabeledImages, torch.device]:
    """Return the weights on their device, the labeled images and the device."""
    check_inputs(name, settings, "labeled data")
    labeled = open_labeled(settings.data)
    device = select_device(settings.device)
    return load_backbone(settings, device, networks), labeled, device


def open_pixels(name: str, settings: PixelSettings, networks: bool = False) -> tuple[Weights, Segmented, torch.device]:
    """Return the weights on their device, the images with labeled pixels, all labels checked, and the device."""
    check_inputs(name, settings, "labeled pixels")
    segmented = open_segmented(settings.data, settings.train_split, settings.val_split, settings.ignore)
    check(segmented, settings.num_workers, distributed.is_main())
    device = select_device(settings.device)
    return load_backbone(settings, device, networks), segmented, device


def load_backbone(settings: EvaluationSettings, device: torch.device, networks: bool = False) -> Weights:
    """Return the weights on the device; with `from_scratch` a new network of the same architecture.

    `networks`: also those of a network that is no ViT.
    """
    weights = load_weights(settings.weights, settings.partial, networks=networks)
    if settings.from_scratch:
        torch.manual_seed(combine(settings.seed, key_of("initial weights")) % 2**63)
        new: Any = weights.vit.like() if weights.network is None else rebuild_network(weights.network)
        weights = replace(weights, vit=new.eval())
    weights.vit.to(device)
    return weights


def crop_size(vit: VisionTransformer, size: int | None) -> int:
    """Return the side of square crops in pixels: `size`, or by default that of the images the ViT was trained on."""
    height, width = vit.input_size
    if size is None and height != width:
        raise UserError(f"the backbone was made for images of {height}x{width} pixels, and crops are square; set size")
    side = size or height
    if side % vit.patch_size:
        raise UserError(f"size={side} is not divisible by patches of {vit.patch_size} pixels; choose one that is")
    return side
