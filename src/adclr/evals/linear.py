"""Linear probe: a linear layer on frozen features, trained with many learning rates at once.

Protocol (DINO's): `[CLS]` of the last 4 blocks one behind the other (up to the width of ViT-S), or `[CLS]` and the mean
patch of the last block (wider ones), through the last norm; random resized crop and flip in training, resize to 256/224
and centre crop in test; SGD with momentum 0.9, no weight decay, cosine to 0 by step, learning rates for a batch of 256.
All learning rates see the same features, so a grid costs one backbone; each classifier is what it would be alone.
`linear_top1` is the best of the grid on the val images themselves, as DINO's followers report it: read it as such. The
score of every learning rate is given. With `quick` the features of the centre crops are taken once and trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from adclr.config.sections import Count, Positive, Section, Several, Share
from adclr.config.settings import Side
from adclr.data.draws import Words, combine, epoch_order, key_of
from adclr.data.sets.classes import Labelled, Split
from adclr.evals.accuracy import accuracies
from adclr.evals.crops import Crops, side
from adclr.evals.features import Features, extract, labels_of
from adclr.evals.task import Task, begin
from adclr.features.reader import normalizer
from adclr.model.optim import cosine
from adclr.model.vit import VisionTransformer
from adclr.system import distributed
from adclr.system.devices import autocast_dtype, send
from adclr.system.progress import Line
from adclr.weights.backbone import Weights

MOMENTUM = 0.9
SMALL = 384  # width of ViT-S
AT_ONCE = 256  # images, where nothing is trained
DEFAULT_LRS = tuple(round(n * 10.0**k, 6) for k in range(-4, 1) for n in (1, 2, 5))


class Protocol(Section):
    epochs: Count = Field(100, description="over the train split")
    batch_size: Count = Field(256, description="images of a step, of all processes")
    lrs: Several[Positive] = Field(
        DEFAULT_LRS, min_length=1, description="learning rates at batch 256, trained together"
    )
    num_blocks: Count | None = Field(None, description="blocks whose [CLS] is taken, the last ones; null: 4 for ViT-S")
    mean_patch: bool | None = Field(None, description="take the mean patch of the last block too; null: for ViT-B")
    min_crop: Share = Field(0.08, description="least area of a training crop, of the image's")
    quick: bool = Field(False, description="train on the features of centre crops, taken once")
    size: Side | None = Field(None, description="side of the images in pixels; null: as the backbone was trained")
    precision: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on a GPU that has it")


class Settings(Protocol, Task):
    pass


def run(settings: Settings, place: Path | None = None) -> dict[str, Any]:
    weights, labelled, device = begin("linear", settings)
    return score(weights, labelled, settings, device, place)


class Grid:
    """Linear classifiers, one for each learning rate, in one tensor; the gradient is written out."""

    def __init__(self, dim: int, num_classes: int, lrs: tuple[float, ...], seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(combine(seed, key_of("linear")) % 2**63)
        first = torch.empty(num_classes, dim).normal_(std=0.01, generator=generator)
        self.count, self.num_classes = len(lrs), num_classes
        self.weight = first.to(device).repeat(len(lrs), 1)  # (G·K)×D
        self.bias = torch.zeros(len(lrs) * num_classes, device=device)
        self.velocity = torch.zeros_like(self.weight), torch.zeros_like(self.bias)
        self.rates = torch.tensor(lrs, device=device).repeat_interleave(num_classes)

    def __call__(self, features: Tensor) -> Tensor:
        """B×D -> B×G×K"""
        return F.linear(features, self.weight, self.bias).view(-1, self.count, self.num_classes)

    def step(self, features: Tensor, labels: Tensor, factor: float, shared: bool) -> None:
        """One step of SGD on the mean cross-entropy of each; `shared`: this is a process's part of the batch."""
        error = F.softmax(self(features), dim=-1)  # the gradient at the logits is this, less 1 at the label
        error -= F.one_hot(labels, self.num_classes).unsqueeze(1)
        error = error.flatten(1) / len(features)
        gradients = error.T @ features, error.sum(dim=0)
        if shared:
            for gradient in gradients:
                distributed.sum_(gradient).div_(distributed.world_size())
        for parameter, velocity, gradient in zip((self.weight, self.bias), self.velocity, gradients, strict=True):
            velocity.mul_(MOMENTUM).add_(gradient)
            rates = factor * self.rates
            parameter -= (rates.unsqueeze(1) if parameter.ndim > 1 else rates) * velocity


def pool(vit: VisionTransformer, settings: Protocol, dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    """Normalised images -> features, float32."""
    small = vit.dim <= SMALL
    blocks = min(vit.depth, settings.num_blocks or (4 if small else 1))
    mean_patch = not small if settings.mean_patch is None else settings.mean_patch

    @torch.no_grad()
    def pooled(images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, dtype=dtype, enabled=dtype is not None):
            tokens = vit.intermediate(images, blocks)
        parts = [one.cls for one in tokens]
        if mean_patch:
            parts.append(tokens[-1].patches.float().mean(dim=1))
        return torch.cat([part.float() for part in parts], dim=-1)

    return pooled


class Steps(NamedTuple):
    """What a grid is trained on."""

    batches: Iterator[tuple[Tensor, Tensor]]  # features and labels
    total: int
    batch_size: int  # of all processes
    shared: bool  # whether a process has only its part of a batch


def from_crops(crops: Crops, weights: Weights, features: Callable[[Tensor], Tensor], settings: Settings) -> Steps:
    """Features of new crops in every epoch."""
    total, local = settings.epochs * crops.steps_per_epoch, crops.batch_size // distributed.world_size()
    normalise = normalizer(weights, crops.device)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        with closing(crops.batches(0, total, local, lambda images, _: (normalise(images), []))) as shown:
            for step, seen in enumerate(shown, 1):
                yield features(seen.images), seen.labels
                if step == crops.steps_per_epoch and crops.feed.store is None:
                    crops.check()

    return Steps(batches(), total, crops.batch_size, True)


def from_features(values: Tensor, labels: Tensor, keys: Words, settings: Settings) -> Steps:
    """The same features in every epoch, in another order; every process trains on all of them."""
    size = min(settings.batch_size, len(labels))
    per_epoch = len(labels) // size

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in range(settings.epochs):
            order = send(epoch_order(settings.seed, epoch, keys), values.device)
            for place in range(per_epoch):
                chosen = order[place * size : (place + 1) * size]
                yield values[chosen], labels[chosen]

    return Steps(batches(), settings.epochs * per_epoch, size, False)


@torch.no_grad()
def train(grid: Grid, steps: Steps) -> None:
    with Line("linear", steps.total, show=distributed.is_main()) as line:
        for step, (features, labels) in enumerate(steps.batches):
            grid.step(features, labels, steps.batch_size / 256 * cosine(1.0, 0.0, step / steps.total), steps.shared)
            line.move(step + 1)


@torch.no_grad()
def score(
    weights: Weights, labelled: Labelled, settings: Settings, device: torch.device, place: Path | None = None
) -> dict[str, Any]:
    """Accuracies in percent of the best learning rate, the top-1 of each, and how many images they rest on."""
    size = side(weights.vit, settings.size)
    features = pool(weights.vit, settings, autocast_dtype(settings.precision, device))
    lrs, classes = tuple(dict.fromkeys(settings.lrs)), labelled.classes

    def look(split: Split, name: str) -> tuple[Features, Tensor]:
        found = extract(
            weights,
            split.source,
            features,
            device,
            AT_ONCE,
            settings.num_workers,
            name,
            show=distributed.is_main(),
            size=(size, size),
            shared=True,
        )
        return found, labels_of(found, split, classes, settings.max_unreadable)

    val, val_labels = look(labelled.val, "val features")
    grid = Grid(val.values.shape[1], len(classes), lrs, settings.seed, device)
    if settings.quick:
        found, labels = look(labelled.train, "train features")
        keys = labelled.train.source.keys[found.kept]
        train(grid, from_features(found.values.to(device), labels.to(device), keys, settings))
        num_train = len(found.kept)
    else:
        crops = Crops(weights, labelled, settings, device, size, settings.batch_size, settings.min_crop)
        train(grid, from_crops(crops, weights, features, settings))
        num_train = crops.num_readable()
    most, parts = min(5, len(classes)), torch.split(val.values.to(device), AT_ONCE)
    rankings = torch.cat([grid(part).topk(most, dim=-1).indices for part in parts]).cpu()  # n×G×5
    each = [100 * (rankings[:, g, 0] == val_labels).double().mean().item() for g in range(len(lrs))]
    best = max(range(len(lrs)), key=each.__getitem__)
    num_images = len(labelled.train.labels) + len(labelled.val.labels)
    return (
        accuracies("linear", rankings[:, best], val_labels, classes, place)
        | {f"linear_top1_lr{lr:g}": found for lr, found in zip(lrs, each, strict=True)}
        | {
            "best_lr": lrs[best],
            "best_lr_chosen_on": "val",
            "num_train": float(num_train),
            "num_val": float(len(val_labels)),
            "num_unreadable": float(num_images - num_train - len(val_labels)),
        }
    )
