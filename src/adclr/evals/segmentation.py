"""Semantic segmentation: a decoder on the backbone, trained on labelled pixels, and mIoU on others.

Three heads, each with the protocol of its source where nothing is set. `linear`: batch norm and a linear layer on the
patches of the last block, the backbone frozen (DINOv2's). `fpn`: Semantic FPN on blocks 3, 6, 9 and 12, all at the
stride of the patches, and `upernet` with its auxiliary head on blocks 4, 6, 8 and 12 rescaled to strides 4 to 32:
everything is trained (SelfPatch's and iBOT's, which the paper follows). Crops are `scaled_crops`'; pixels that are
ignored count as 0 in the mean of the loss. With a place to write to, training is resumed there (see `course`), and the
model is left there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from adclr.config.sections import Count, Positive, Several, UserError
from adclr.config.settings import Side
from adclr.data.draws import combine, key_of
from adclr.data.sets.pixels import IGNORE, Segmented
from adclr.evals import iou, trainer
from adclr.evals.decoders import Fpn, Linear, Logits, UperNet
from adclr.evals.features import count_unreadable
from adclr.evals.frames import fitting, likeliest, read_frames, resized
from adclr.evals.overlays import Pictures
from adclr.evals.pyramid import Pyramid, blocks_at
from adclr.evals.scaled_crops import ScaledCrops, Shown
from adclr.evals.task import Pixelwise, begin_pixelwise
from adclr.evals.trainer import Course, Pace
from adclr.features.reader import ImageReader, normalizer
from adclr.model import optim
from adclr.model.compiled import compile_blocks
from adclr.system import distributed
from adclr.system.devices import autocast_dtype
from adclr.system.runs import Run
from adclr.weights.backbone import Weights
from adclr.weights.tensors import fingerprint

Head = Literal["linear", "fpn", "upernet"]
AUXILIARY = 0.4  # weight of the auxiliary head's loss
# settings that a resumed training may have otherwise: how, not what
HOW = {
    *("weights", "data", "num_workers", "device", "max_unreadable", "compile", "checkpoint_minutes"),
    *("pictures", "test_batch_size", "inference", "test_scales", "test_mirrored", "val_split"),
}


class Settings(Pace, Pixelwise):
    head: Head = Field("linear", description="what is trained on the backbone")
    frozen: bool | None = Field(None, description="train the head alone; null: for linear")
    rescaled: bool | None = Field(None, description="rescale maps to a pyramid; null: for upernet")
    width: Count | None = Field(None, description="channels of the decoder; null: 256 for fpn, the ViT's for upernet")
    drop_path: Annotated[float, Field(ge=0, lt=1)] | None = Field(None, description="of the last block; frozen: none")
    size: Side = Field(512, description="side of the crops, and shorter side of test images, pixels")
    scales: tuple[Positive, Positive] = Field((0.5, 2.0), description="of the shorter side, before crops are cut")
    colours: bool = Field(True, description="change brightness, contrast, saturation and hue in training")
    inference: Literal["auto", "whole", "sliding"] = Field("auto", description="auto: sliding for upernet")
    stride: Side | None = Field(None, description="of sliding windows of the crops' size; null: two thirds of it")
    test_scales: Several[Positive] = Field((1.0,), min_length=1, description="at which test images are seen")
    test_mirrored: bool = Field(False, description="see their mirror images too")
    test_batch_size: Count = Field(8, description="test images at once")
    precision: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on a GPU that has it")
    compile: bool = Field(False, description="compile the blocks, which takes half a minute on a GPU")


@dataclass(frozen=True)
class Protocol:
    """What a head's source does where nothing is set."""

    steps: int
    batch_size: int
    lr: float
    warmup_steps: int
    weight_decay: float
    layer_decay: float
    drop_path: float
    frozen: bool
    rescaled: bool
    sliding: bool


PROTOCOLS: dict[Head, Protocol] = {
    "linear": Protocol(40_000, 16, 1e-3, 1500, 1e-4, 1.0, 0.0, True, False, False),
    "fpn": Protocol(40_000, 16, 6e-5, 1500, 0.01, 1.0, 0.1, False, False, False),
    "upernet": Protocol(160_000, 16, 3e-5, 1500, 0.05, 0.9, 0.1, False, True, True),
}


def protocol_of(settings: Settings) -> Protocol:
    """The head's, with what is set instead."""
    own = PROTOCOLS[settings.head]
    told = {name: value for name in vars(own) if (value := getattr(settings, name, None)) is not None}
    if settings.inference != "auto":
        told["sliding"] = settings.inference == "sliding"
    made = replace(own, **told)
    if settings.from_scratch and settings.layer_decay is None:
        made = replace(made, layer_decay=1.0)
    if settings.warmup_steps is None:
        made = replace(made, warmup_steps=min(made.warmup_steps, made.steps // 10))
    return replace(made, drop_path=0.0) if made.frozen else made


class Segmenter(nn.Module):
    """Normalised images -> logits; in training, with labels, losses."""

    def __init__(self, weights: Weights, settings: Settings, protocol: Protocol, num_classes: int) -> None:
        super().__init__()
        vit, head = weights.vit, settings.head
        torch.manual_seed(combine(settings.seed, key_of("decoder")) % 2**63)
        blocks = {"linear": [12], "fpn": [3, 6, 9, 12], "upernet": [4, 6, 8, 12]}[head]
        if protocol.rescaled and head == "linear":
            raise UserError("the linear head reads one map, which is not rescaled; leave rescaled=null")
        normed = head != "fpn"
        self.pyramid = Pyramid(vit, blocks_at(vit.depth, blocks), normed, protocol.rescaled, protocol.frozen)
        dims = [vit.dim] * len(blocks)
        self.decoder: nn.Module
        if head == "linear":
            self.decoder = Linear(vit.dim, num_classes)
        elif head == "fpn":
            self.decoder = Fpn(dims, num_classes, settings.width or 256)
        else:
            auxiliary = max(1, settings.width // 2) if settings.width else 256
            self.decoder = UperNet(dims, num_classes, settings.width or vit.dim, auxiliary)

    def logits(self, images: Tensor, kept: Tensor | None = None) -> Logits:
        maps = [x.contiguous(memory_format=torch.channels_last) for x in self.pyramid(images, kept)]
        found: Logits = self.decoder(maps)
        return found

    def forward(self, images: Tensor, labels: Tensor, kept: Tensor | None = None) -> dict[str, Tensor]:
        found, auxiliary = self.logits(images, kept)
        losses = {"loss_pixels": _loss(found, labels)}
        return losses if auxiliary is None else losses | {"loss_auxiliary": AUXILIARY * _loss(auxiliary, labels)}


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    enlarged = F.interpolate(logits.float(), size=labels.shape[-2:], mode="bilinear")
    return F.cross_entropy(enlarged, labels, ignore_index=IGNORE, reduction="sum") / labels.numel()


@dataclass(frozen=True)
class Job:
    """All that a segmentation consists of."""

    settings: Settings
    protocol: Protocol
    weights: Weights
    segmented: Segmented
    model: Segmenter
    device: torch.device
    dtype: torch.dtype | None  # of autocast

    @property
    def unit(self) -> int:
        """Pixels that the sides of images are multiples of."""
        return self.weights.vit.patch_size * (2 if self.protocol.rescaled else 1)


def run(settings: Settings, place: Path | None = None) -> dict[str, Any]:
    weights, segmented, device = begin_pixelwise("segmentation", settings)
    return score(weights, segmented, settings, device, place)


def score(
    weights: Weights, segmented: Segmented, settings: Settings, device: torch.device, place: Path | None = None
) -> dict[str, Any]:
    """Trains; mIoU, aAcc and mAcc in percent, and how many steps and images they rest on."""
    protocol = protocol_of(settings)
    model = Segmenter(weights, settings, protocol, len(segmented.classes)).to(device)
    model = model.to(memory_format=torch.channels_last)
    job = Job(settings, protocol, weights, segmented, model, device, autocast_dtype(settings.precision, device))
    _refuse_impossible(job)
    size = settings.size
    work = None if place is None else Run(place)
    with trainer.locked(work):
        distributed.barrier()
        crops = ScaledCrops(
            weights,
            segmented.train,
            segmented.decoder(weights.decoder, max(weights.vit.patch_size, round(size * settings.scales[1]))),
            device,
            size,
            protocol.batch_size,
            settings.seed,
            settings.scales,
            protocol.drop_path,
            settings.num_workers,
            settings.max_unreadable,
        )
        whole = assemble(job, crops, work)
        if settings.compile:
            _compile(job, whole)
        steps = trainer.train(whole)
        found = test(job, place)
        facts = {"classes": segmented.classes, "head": settings.head, "mean": weights.mean, "std": weights.std}
        trainer.finish(whole, facts)
    unreadable = len(crops.feed.unreadable)
    return found | {"num_steps": float(steps), "num_train": float(len(segmented.train) - unreadable)}


def _refuse_impossible(job: Job) -> None:
    """Settings that would fail in training, or after it."""
    settings, unit, size = job.settings, job.unit, job.settings.size
    if size % unit:
        raise UserError(f"size={size} is not divisible by {unit}; set size={-(-size // unit) * unit}")
    if settings.stride is not None and settings.stride > size:
        raise UserError(f"stride={settings.stride} would leave pixels between windows of {size}; set at most size")
    if settings.scales[0] > settings.scales[1]:
        raise UserError(f"scales={list(settings.scales)} are not in order; give the smaller first")
    cells = 1 if settings.head == "upernet" else (size // unit) ** 2  # of the smallest map that is normed
    if job.protocol.batch_size * cells < 2:
        raise UserError("a batch of one image has no statistics for batch norm here; set batch_size=2 or more")


def assemble(job: Job, crops: ScaledCrops, work: Run | None) -> Course:
    settings, protocol, model = job.settings, job.protocol, job.model

    def losses(network: nn.Module, seen: Shown) -> dict[str, Tensor]:
        with torch.autocast(job.device.type, dtype=job.dtype, enabled=job.dtype is not None):
            found: dict[str, Tensor] = network(seen.images, seen.labels, seen.kept)
        return found

    def lr_at(share: float, step: int) -> float:
        """Linear up, and linear down to 0."""
        return protocol.lr * min(1.0, (step + 1) / (protocol.warmup_steps + 1)) * (1 - share)

    trained = [(name.removeprefix("pyramid.vit."), p) for name, p in model.named_parameters() if p.requires_grad]
    groups = optim.layer_groups(trained, job.weights.vit.depth, protocol.layer_decay, protocol.weight_decay)
    told = settings.model_dump(mode="json", exclude=HOW)
    return Course(
        name="segmentation",
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.0, fused=True),
        batches=lambda start, end: crops.batches(start, end, settings.colours),
        losses=losses,
        lr_at=lr_at,
        total=protocol.steps,
        seed=settings.seed,
        device=job.device,
        clip_norm=settings.clip_norm,
        minutes=settings.minutes,
        checkpoint_minutes=settings.checkpoint_minutes,
        run=work,
        identity={
            "settings": told,
            "images": job.segmented.train.fingerprint(),
            "start": fingerprint(model.state_dict()),
        },
    )


def _compile(job: Job, whole: Course) -> None:
    """One trial of noise; leaves no gradient behind, and batch norms as they were."""
    model, size = job.model, job.settings.size
    vit, local = model.pyramid.vit, job.protocol.batch_size // distributed.world_size()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def trial() -> None:
        images = torch.randn(local, vit.num_channels, size, size, device=job.device)
        labels = torch.zeros(local, size, size, dtype=torch.int64, device=job.device)
        kept = torch.ones(vit.depth, 2, local, device=job.device) if job.protocol.drop_path else None
        with torch.autocast(job.device.type, dtype=job.dtype, enabled=job.dtype is not None):
            found = model.train()(images, labels, kept)
        torch.stack(list(found.values())).sum().backward()  # type: ignore[no-untyped-call]

    compile_blocks([vit], trial)
    whole.optimizer.zero_grad(set_to_none=True)
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])


@torch.no_grad()
def test(job: Job, place: Path | None) -> dict[str, Any]:
    """The scores of a trained model on the val images."""
    settings, segmented, device, weights = job.settings, job.segmented, job.device, job.weights
    normalise = normalizer(weights, device)
    window = (settings.size, settings.stride or settings.size * 2 // 3) if job.protocol.sliding else None
    tally = iou.Tally(len(segmented.classes), device)
    decoder = segmented.decoder(weights.decoder)
    reader = ImageReader(segmented.val, decoder, None, device, settings.num_workers)
    pictures = Pictures(segmented.classes, settings.pictures if place is not None else 0, len(segmented.val))

    def network(images: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=job.dtype, enabled=job.dtype is not None):
            return job.model.logits(normalise(images))[0]

    job.model.eval()
    for frames in read_frames(reader, settings.test_batch_size, "val"):
        predicted = predict(
            network, frames.images, settings.size, job.unit, window, settings.test_scales, settings.test_mirrored
        )
        tally.add(predicted, frames.labels)
        pictures.add(frames, predicted)
    found = iou.scores("segmentation", tally.matrix(), segmented.classes)
    missed = count_unreadable(reader, settings.max_unreadable)
    if place is not None:
        pictures.write(place)
    return found | {"num_val": float(len(segmented.val) - missed), "num_unreadable": float(missed)}


Network = Callable[[Tensor], Tensor]  # images in [0, 1] -> logits at some stride


def starts(length: int, window: int, stride: int) -> list[int]:
    """Where windows begin so that they cover a length; the last is moved back to end where it ends."""
    count = max(0, -(-(length - window) // stride)) + 1
    return [max(0, min(number * stride, length - window)) for number in range(count)]


def whole(network: Network, images: Tensor) -> Tensor:
    """B×C×H×W -> logits B×K×H×W"""
    return F.interpolate(network(images).float(), size=images.shape[-2:], mode="bilinear")


def sliding(network: Network, images: Tensor, window: int, stride: int, at_once: int = 16) -> Tensor:
    """The mean of the logits of all windows a pixel lies in."""
    height, width = images.shape[-2:]
    tall, wide = min(window, height), min(window, width)
    places = [(top, left) for top in starts(height, tall, stride) for left in starts(width, wide, stride)]
    sums: Tensor | None = None
    counts = torch.zeros(height, width, device=images.device)
    together = max(1, at_once // len(images))
    for first in range(0, len(places), together):
        chosen = places[first : first + together]
        pieces = torch.cat([images[..., top : top + tall, left : left + wide] for top, left in chosen])
        for (top, left), found in zip(chosen, torch.split(whole(network, pieces), len(images)), strict=True):
            if sums is None:
                sums = found.new_zeros(len(images), found.shape[1], height, width)
            sums[..., top : top + tall, left : left + wide] += found
            counts[top : top + tall, left : left + wide] += 1
    assert sums is not None
    return sums / counts


def predict(
    network: Network,
    images: Tensor,
    side: int,
    unit: int,
    window: tuple[int, int] | None,
    scales: Sequence[float] = (1.0,),
    mirrored: bool = False,
) -> Tensor:
    """n×C×height×width uint8 -> n×height×width classes.

    Images are resized to a shorter side of `side` times each scale; `window`: side and stride of windows. Of several
    scales, or of an image and its mirror image, the mean of the probabilities decides.
    """
    size = images.shape[-2], images.shape[-1]

    def logits(pixels: Tensor) -> Tensor:
        return whole(network, pixels) if window is None else sliding(network, pixels, *window)

    if len(scales) == 1 and not mirrored:
        return likeliest(logits(resized(images, fitting(size, round(side * scales[0]), unit))), size)
    total: Tensor | None = None
    for scale in scales:
        pixels = resized(images, fitting(size, round(side * scale), unit))
        for seen in (pixels, pixels.flip(-1)) if mirrored else (pixels,):
            found = F.interpolate(logits(seen), size=size, mode="bilinear").softmax(dim=1)
            found = found if seen is pixels else found.flip(-1)
            total = found if total is None else total + found
    assert total is not None
    return total.argmax(dim=1)
