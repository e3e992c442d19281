"""Semantic segmentation: a decoder on the backbone is trained on labeled pixels and scored by mIoU.

Three heads, each with the protocol of its source for all that is not set. `linear`: batch norm and a linear layer on
the patches of the last block, the backbone frozen (DINOv2's). `fpn`: Semantic FPN on blocks 3, 6, 9 and 12, all at the
stride of the patches, and `upernet` with its auxiliary head on blocks 4, 6, 8 and 12 rescaled to strides 4 to 32:
everything is trained (SelfPatch's and iBOT's, which the paper follows). Crops are those of `scaled_crops`; ignored
pixels count as 0 in the mean of the loss. With an output prefix the training is resumed in the folder PREFIX (see
`trainer`), which finally holds the model; PREFIX.png shows some predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from adclr.config.parsing import Count, Positive, Several, Side, UserError, setting
from adclr.data.feed import Prefetcher
from adclr.data.random_draws import Draws, combine, key_of
from adclr.data.sets.pixels import IGNORE, Segmented
from adclr.evals import iou, trainer
from adclr.evals.decoders import Fpn, Linear, Logits, UperNet
from adclr.evals.features import count_unreadable
from adclr.evals.frames import fit_size, most_likely_class, read_frames, resize_images
from adclr.evals.overlays import Overlays
from adclr.evals.pyramid import Pyramid, blocks_at
from adclr.evals.scaled_crops import PixelBatch, ScaledCrops
from adclr.evals.task import PixelSettings, open_pixels
from adclr.evals.trainer import Trainer, TrainingSettings
from adclr.features.reader import ImageReader, normalizer
from adclr.model import optim
from adclr.system import distributed
from adclr.system.devices import autocast_dtype
from adclr.system.runs import Run
from adclr.weights.backbone import Weights
from adclr.weights.tensors import fingerprint

Head = Literal["linear", "fpn", "upernet"]
AUXILIARY = 0.4  # weight of the auxiliary head's loss


class Settings(TrainingSettings, PixelSettings):
    """Settings of `evaluate segmentation`."""

    head: Head = Field("linear", description="head on the backbone")
    frozen: bool | None = Field(None, description="train the head alone; null: only if head=linear")
    rescaled: bool | None = Field(None, description="rescale feature maps to a pyramid; null: only if head=upernet")
    width: Count | None = Field(
        None, description="channels of the decoder; null: 256 for fpn, the width of the ViT for upernet"
    )
    drop_path: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="drop path rate of the last block; 0 if frozen"
    )
    size: Side = Field(512, description="side of training crops and shorter side of test images, pixels")
    scales: tuple[Positive, Positive] = Field(
        (0.5, 2.0), description="range of scales of the shorter side before cropping"
    )
    colors: bool = setting(True, description="color jitter in training", old_name="colours")
    inference: Literal["auto", "whole", "sliding"] = setting(
        "auto", description="whole images or sliding windows; auto: sliding if head=upernet", free=["resume"]
    )
    stride: Side | None = Field(None, description="of sliding windows of the crops' size; null: two thirds of it")
    test_scales: Several[Positive] = setting(
        (1.0,), min_length=1, description="scales of test-time augmentation", free=["resume"]
    )
    test_mirrored: bool = setting(False, "also test on mirrored images", free=["resume"])
    test_batch_size: Count = setting(8, "test images per batch", free=["resume", "study"])
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", description="auto: bfloat16 on a GPU that has it", free=["study"]
    )
    compile: bool = setting(
        False, description="compile the blocks, in half a minute on a GPU", free=["resume", "study"]
    )


@dataclass(frozen=True)
class Protocol:
    """The values of a head's source for settings that are null."""

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
    """Return the protocol of the head, with the settings that are not null in place of its values."""
    protocol = PROTOCOLS[settings.head]
    changes = {name: value for name in vars(protocol) if (value := getattr(settings, name, None)) is not None}
    if settings.inference != "auto":
        changes["sliding"] = settings.inference == "sliding"
    protocol = replace(protocol, **changes)
    if settings.from_scratch and settings.layer_decay is None:
        protocol = replace(protocol, layer_decay=1.0)
    if settings.warmup_steps is None:
        protocol = replace(protocol, warmup_steps=min(protocol.warmup_steps, protocol.steps // 10))
    return replace(protocol, drop_path=0.0) if protocol.frozen else protocol


class Segmenter(nn.Module):
    """A backbone with a decoder."""

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

    def logits(self, images: Tensor, path_scales: Tensor | None = None) -> Logits:
        """Return the logits of normalized images at some stride, and in training those of the auxiliary head."""
        maps = [x.contiguous(memory_format=torch.channels_last) for x in self.pyramid(images, path_scales)]
        logits: Logits = self.decoder(maps)
        return logits

    def forward(self, images: Tensor, labels: Tensor, path_scales: Tensor | None = None) -> dict[str, Tensor]:
        """Return the losses of normalized images by name."""
        logits, auxiliary = self.logits(images, path_scales)
        losses = {"loss_pixels": _loss(logits, labels)}
        return losses if auxiliary is None else losses | {"loss_auxiliary": AUXILIARY * _loss(auxiliary, labels)}


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy at the size of the labels, in which ignored pixels count as 0."""
    enlarged = F.interpolate(logits.float(), size=labels.shape[-2:], mode="bilinear")
    return F.cross_entropy(enlarged, labels, ignore_index=IGNORE, reduction="sum") / labels.numel()


@dataclass(kw_only=True)
class _SegmentationTrainer(Trainer):
    """The training of a segmenter."""

    settings: Settings
    protocol: Protocol
    model: Segmenter
    crops: ScaledCrops
    dtype: torch.dtype | None  # of autocast

    def batches(self, start: int, end: int) -> Prefetcher[PixelBatch]:
        """Return the batches of crops."""
        return self.crops.batches(start, end, self.settings.colors)

    def losses(self, model: nn.Module, batch: PixelBatch, step: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the losses of the decoder and of its auxiliary head."""
        with torch.autocast(batch.images.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            losses: dict[str, Tensor] = model(batch.images, batch.labels, batch.path_scales)
        return losses

    def lr_at(self, progress: float, step: int) -> float:
        """Return the learning rate: linear warm-up, and linear decay to 0."""
        return self.protocol.lr * min(1.0, (step + 1) / (self.protocol.warmup_steps + 1)) * (1 - progress)

    def compile_if_set(self) -> None:
        """Compile the blocks for the crops of a process."""
        if not self.settings.compile:
            return
        vit, size, device = self.model.pyramid.vit, self.settings.size, self.crops.device
        local_size = self.protocol.batch_size // distributed.world_size()
        images = torch.randn(local_size, vit.num_channels, size, size, device=device)
        labels = torch.zeros(local_size, size, size, dtype=torch.int64, device=device)
        path_scales = torch.ones(vit.depth, 2, local_size, device=device) if self.protocol.drop_path else None
        keys = np.zeros(local_size, np.uint64)
        self.compile(vit, PixelBatch(images, labels, path_scales, np.arange(local_size), Draws(0, 0, keys)))


def run(settings: Settings, prefix: Path | None = None) -> dict[str, Any]:
    """Train a decoder and return the scores."""
    weights, segmented, device = open_pixels("segmentation", settings)
    return score(weights, segmented, settings, device, prefix)


def score(
    weights: Weights, segmented: Segmented, settings: Settings, device: torch.device, prefix: Path | None = None
) -> dict[str, Any]:
    """Train; return mIoU, aAcc and mAcc in percent, and the numbers of steps and images."""
    protocol = protocol_of(settings)
    model = Segmenter(weights, settings, protocol, len(segmented.classes)).to(device)
    model = model.to(memory_format=torch.channels_last)
    unit = weights.vit.patch_size * (2 if protocol.rescaled else 1)  # pixels that the sides of images are multiples of
    _check_settings(settings, protocol, unit)
    run = None if prefix is None else Run(prefix)
    with trainer.lock(run):
        distributed.barrier()  # until the first process has locked the directory
        training = assemble(weights, segmented, settings, protocol, model, device, run)
        training.compile_if_set()
        steps = training.train()
        scores = _test(training, weights, segmented, unit, prefix)
        training.finish({"classes": segmented.classes, "head": settings.head, "mean": weights.mean, "std": weights.std})
    num_train = len(segmented.train) - len(training.crops.feed.unreadable)
    return scores | {"num_steps": float(steps), "num_train": float(num_train)}


def _check_settings(settings: Settings, protocol: Protocol, unit: int) -> None:
    """Refuse settings that would fail in training, or after it."""
    size = settings.size
    if size % unit:
        raise UserError(f"size={size} is not divisible by {unit}; set size={-(-size // unit) * unit}")
    if settings.stride is not None and settings.stride > size:
        raise UserError(f"stride={settings.stride} would leave pixels between windows of {size}; set at most size")
    if settings.scales[0] > settings.scales[1]:
        raise UserError(f"scales={list(settings.scales)} are not in order; give the smaller first")
    cells = 1 if settings.head == "upernet" else (size // unit) ** 2  # of the smallest map with a batch norm
    if protocol.batch_size * cells < 2:
        raise UserError("a batch of one image has no statistics for batch norm here; set batch_size=2 or more")


def assemble(
    weights: Weights,
    segmented: Segmented,
    settings: Settings,
    protocol: Protocol,
    model: Segmenter,
    device: torch.device,
    run: Run | None,
) -> _SegmentationTrainer:
    """Return the training of the settings."""
    crops = ScaledCrops(
        weights,
        segmented.train,
        segmented.decoder(weights.decoder, max(weights.vit.patch_size, round(settings.size * settings.scales[1]))),
        device,
        settings.size,
        protocol.batch_size,
        settings.seed,
        settings.scales,
        protocol.drop_path,
        settings.num_workers,
        settings.max_unreadable,
    )
    trained = [(name.removeprefix("pyramid.vit."), p) for name, p in model.named_parameters() if p.requires_grad]
    groups = optim.layer_decay_groups(trained, weights.vit.depth, protocol.layer_decay, protocol.weight_decay)
    start = fingerprint(model.state_dict())
    return _SegmentationTrainer(
        name="segmentation",
        settings=settings,
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.0, fused=True),
        total_steps=protocol.steps,
        minutes=settings.minutes,
        run=run,
        identity=trainer.identify(settings, segmented.train.fingerprint(), start),
        protocol=protocol,
        crops=crops,
        dtype=autocast_dtype(settings.precision, device),
    )


@torch.no_grad()
def _test(
    training: _SegmentationTrainer, weights: Weights, segmented: Segmented, unit: int, prefix: Path | None
) -> dict[str, Any]:
    """Return the scores of the trained model on the val images."""
    settings, device, dtype, model = training.settings, training.crops.device, training.dtype, training.model
    normalize = normalizer(weights, device)
    window = (settings.size, settings.stride or settings.size * 2 // 3) if training.protocol.sliding else None
    confusion = iou.Confusion(len(segmented.classes), device)
    decoder = segmented.decoder(weights.decoder)
    reader = ImageReader(segmented.val, decoder, None, device, settings.num_workers)
    overlays = Overlays(segmented.classes, settings.pictures, len(segmented.val), prefix)

    def network(images: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            return model.logits(normalize(images))[0]

    model.eval()
    for frames in read_frames(reader, settings.test_batch_size, "val"):
        predicted = predict(
            network, frames.images, settings.size, unit, window, settings.test_scales, settings.test_mirrored
        )
        confusion.add(predicted, frames.labels)
        overlays.add(frames, predicted)
    scores = iou.scores("segmentation", confusion.matrix(), segmented.classes)
    num_unreadable = count_unreadable(reader, settings.max_unreadable)
    overlays.write()
    return scores | {"num_val": float(len(segmented.val) - num_unreadable), "num_unreadable": float(num_unreadable)}


Network = Callable[[Tensor], Tensor]  # images in [0, 1] -> logits at some stride


def window_starts(length: int, window: int, stride: int) -> list[int]:
    """Return the starts of windows that cover a length; the last window ends where the length ends."""
    count = max(0, -(-(length - window) // stride)) + 1
    return [max(0, min(number * stride, length - window)) for number in range(count)]


def predict_whole(network: Network, images: Tensor) -> Tensor:
    """Return the logits of B×C×H×W images at their size, B×K×H×W."""
    return F.interpolate(network(images).float(), size=images.shape[-2:], mode="bilinear")


def predict_sliding(network: Network, images: Tensor, window: int, stride: int, at_once: int = 16) -> Tensor:
    """Return for each pixel the mean of the logits of all windows that contain it."""
    height, width = images.shape[-2:]
    tall, wide = min(window, height), min(window, width)
    corners = [
        (top, left) for top in window_starts(height, tall, stride) for left in window_starts(width, wide, stride)
    ]
    sums: Tensor | None = None
    counts = torch.zeros(height, width, device=images.device)
    windows_at_once = max(1, at_once // len(images))
    for first in range(0, len(corners), windows_at_once):
        chosen = corners[first : first + windows_at_once]
        crops = torch.cat([images[..., top : top + tall, left : left + wide] for top, left in chosen])
        for (top, left), logits in zip(chosen, torch.split(predict_whole(network, crops), len(images)), strict=True):
            if sums is None:
                sums = logits.new_zeros(len(images), logits.shape[1], height, width)
            sums[..., top : top + tall, left : left + wide] += logits
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
    """Return the classes n×height×width of n×C×height×width uint8 images.

    Images are resized to a shorter side of `side` times each scale; `window`: side and stride of sliding windows. For
    several scales, or with the mirror image, the class of the largest mean probability is taken.
    """
    size = images.shape[-2], images.shape[-1]

    def logits_of(pixels: Tensor) -> Tensor:
        return predict_whole(network, pixels) if window is None else predict_sliding(network, pixels, *window)

    if len(scales) == 1 and not mirrored:
        return most_likely_class(logits_of(resize_images(images, fit_size(size, round(side * scales[0]), unit))), size)
    total: Tensor | None = None
    for scale in scales:
        pixels = resize_images(images, fit_size(size, round(side * scale), unit))
        for flip in (False, True) if mirrored else (False,):
            logits = logits_of(pixels.flip(-1) if flip else pixels)
            probabilities = F.interpolate(logits, size=size, mode="bilinear").softmax(dim=1)
            probabilities = probabilities.flip(-1) if flip else probabilities
            total = probabilities if total is None else total + probabilities
    assert total is not None
    return total.argmax(dim=1)
