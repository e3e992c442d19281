"""Linear probe: a linear layer on frozen features, trained with many learning rates at once.

Protocol (DINO's): `[CLS]` of the last 4 blocks concatenated (up to the width of ViT-S), or `[CLS]` and the mean patch
of the last block (wider ViTs), through the last norm; random resized crop and flip in training, resize to 256/224 and
center crop in test; SGD with momentum 0.9, no weight decay, cosine to 0 by step, learning rates for a batch of 256.
All learning rates share the features, so a grid costs one pass of the backbone; each classifier is the one it would be
alone. `linear_top1` is the best of the grid on the val images themselves, as in DINO and later papers, and therefore
optimistic; the score of every learning rate is given. With `quick` the classifiers are trained on features of center
crops that are extracted once.
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

from adclr.config.parsing import Count, Positive, Section, Several, Share, Side, setting
from adclr.data.random_draws import Keys, combine, epoch_order, key_of
from adclr.data.sets.classes import LabeledImages, Split
from adclr.evals.accuracy import accuracies, count_images
from adclr.evals.crops import TrainingCrops
from adclr.evals.features import Features, extract_features, readable_labels
from adclr.evals.task import ClassificationSettings, crop_size, open_classification
from adclr.features.reader import normalizer
from adclr.model.optim import cosine
from adclr.model.vit import VisionTransformer
from adclr.system import distributed
from adclr.system.devices import autocast_dtype, send
from adclr.system.progress import ProgressLine
from adclr.weights.backbone import Weights

MOMENTUM = 0.9
SMALL_WIDTH = 384  # of ViT-S
TEST_BATCH_SIZE = 256
DEFAULT_LRS = tuple(round(n * 10.0**k, 6) for k in range(-4, 1) for n in (1, 2, 5))


class LinearSettings(Section):
    """Settings of a linear probe, which `transfer` has too."""

    epochs: Count = Field(100, description="passes over the train split")
    batch_size: Count = Field(256, description="images per step, over all processes")
    lrs: Several[Positive] = Field(
        DEFAULT_LRS, min_length=1, description="learning rates at batch size 256, which are all trained at once"
    )
    num_blocks: Count | None = Field(
        None, description="number of last blocks whose [CLS] is used; null: 4 up to the width of ViT-S, else 1"
    )
    mean_patch: bool | None = Field(
        None, description="also use the mean patch of the last block; null: only for networks wider than ViT-S"
    )
    min_crop: Share = Field(0.08, description="smallest area of a training crop, as a share of the image")
    quick: bool = Field(False, description="train on features of center crops, which are computed once")
    size: Side | None = Field(None, description="image size, pixels; null: the size of training")
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "auto: bfloat16 on a GPU that has it", free=["study"]
    )


class Settings(LinearSettings, ClassificationSettings):
    """Settings of `evaluate linear`."""


def run(settings: Settings, prefix: Path | None = None) -> dict[str, Any]:
    """Train linear classifiers and return the scores."""
    weights, labeled, device = open_classification("linear", settings, networks=True)
    return score(weights, labeled, settings, device, prefix)


class Grid:
    """Linear classifiers, one for each learning rate, in one tensor, with an explicit gradient."""

    def __init__(self, dim: int, num_classes: int, lrs: tuple[float, ...], seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(combine(seed, key_of("linear")) % 2**63)
        initial = torch.empty(num_classes, dim).normal_(std=0.01, generator=generator)
        self.count, self.num_classes = len(lrs), num_classes
        self.weight = initial.to(device).repeat(len(lrs), 1)  # (G·K)×D
        self.bias = torch.zeros(len(lrs) * num_classes, device=device)
        self.velocity = torch.zeros_like(self.weight), torch.zeros_like(self.bias)
        self.rates = torch.tensor(lrs, device=device).repeat_interleave(num_classes)

    def __call__(self, features: Tensor) -> Tensor:
        """Return the logits B×G×K of features B×D."""
        return F.linear(features, self.weight, self.bias).view(-1, self.count, self.num_classes)

    def step(self, features: Tensor, labels: Tensor, factor: float, shared: bool) -> None:
        """Do a step of SGD on the mean cross-entropy of each; `shared`: the batch is this process's part of one."""
        error = F.softmax(self(features), dim=-1)  # minus 1 at the label: the gradient of the logits
        error -= F.one_hot(labels, self.num_classes).unsqueeze(1)
        error = error.flatten(1) / len(features)
        gradients = error.T @ features, error.sum(dim=0)
        if shared:
            for gradient in gradients:
                distributed.all_reduce_sum(gradient).div_(distributed.world_size())
        for parameter, velocity, gradient in zip((self.weight, self.bias), self.velocity, gradients, strict=True):
            velocity.mul_(MOMENTUM).add_(gradient)
            rates = factor * self.rates
            parameter -= (rates.unsqueeze(1) if parameter.ndim > 1 else rates) * velocity


def pool(vit: VisionTransformer, settings: LinearSettings, dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    """Return the function from normalized images to features, float32."""
    small = vit.dim <= SMALL_WIDTH
    # with class attention [CLS] is of the last block alone, as DINO's program takes it of networks like that
    blocks = min(vit.depth, settings.num_blocks or (4 if small and not vit.class_attention else 1))
    mean_patch = not small if settings.mean_patch is None else settings.mean_patch

    @torch.no_grad()
    def pool_tokens(images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, dtype=dtype, enabled=dtype is not None):
            tokens = vit.intermediate(images, blocks)
        parts = [block_tokens.cls for block_tokens in tokens]
        if mean_patch:
            parts.append(tokens[-1].patches.float().mean(dim=1))
        return torch.cat([part.float() for part in parts], dim=-1)

    return pool_tokens


class _Batches(NamedTuple):
    """The features and labels that a grid is trained on."""

    batches: Iterator[tuple[Tensor, Tensor]]
    total: int
    batch_size: int  # of all processes
    shared: bool  # whether a process has only its part of a batch


def _batches_of_crops(
    crops: TrainingCrops, weights: Weights, features: Callable[[Tensor], Tensor], settings: Settings
) -> _Batches:
    """Return features of new crops in every epoch."""
    total, local_size = settings.epochs * crops.steps_per_epoch, crops.batch_size // distributed.world_size()
    normalize = normalizer(weights, crops.device)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        with closing(crops.batches(0, total, local_size, lambda images, _: (normalize(images), None))) as crop_batches:
            for step, batch in enumerate(crop_batches, 1):
                yield features(batch.images), batch.labels
                if step == crops.steps_per_epoch:
                    crops.check_if_streamed()

    return _Batches(batches(), total, crops.batch_size, True)


def _batches_of_features(values: Tensor, labels: Tensor, keys: Keys, settings: Settings) -> _Batches:
    """Return the same features in every epoch, in another order; every process trains on all of them."""
    size = min(settings.batch_size, len(labels))
    per_epoch = len(labels) // size

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in range(settings.epochs):
            order = send(epoch_order(settings.seed, epoch, keys), values.device)
            for number in range(per_epoch):
                chosen = order[number * size : (number + 1) * size]
                yield values[chosen], labels[chosen]

    return _Batches(batches(), settings.epochs * per_epoch, size, False)


@torch.no_grad()
def _train(grid: Grid, data: _Batches) -> None:
    """Train all classifiers of the grid."""
    with ProgressLine("linear", data.total, show=distributed.is_main()) as line:
        for step, (features, labels) in enumerate(data.batches):
            grid.step(features, labels, data.batch_size / 256 * cosine(1.0, 0.0, step / data.total), data.shared)
            line.move(step + 1)


@torch.no_grad()
def score(
    weights: Weights, labeled: LabeledImages, settings: Settings, device: torch.device, prefix: Path | None = None
) -> dict[str, Any]:
    """Return accuracies in percent of the best learning rate, the top-1 of each, and the numbers of images."""
    size = crop_size(weights.vit, settings.size)
    pool_images = pool(weights.vit, settings, autocast_dtype(settings.precision, device))
    lrs, classes = tuple(dict.fromkeys(settings.lrs)), labeled.classes

    def extract_split(split: Split, name: str) -> tuple[Features, Tensor]:
        features = extract_features(
            weights,
            split.source,
            pool_images,
            device,
            TEST_BATCH_SIZE,
            settings.num_workers,
            name,
            show=distributed.is_main(),
            size=(size, size),
            shared=True,
        )
        return features, readable_labels(features, split, classes, settings.max_unreadable)

    val, val_labels = extract_split(labeled.val, "val features")
    grid = Grid(val.values.shape[1], len(classes), lrs, settings.seed, device)
    if settings.quick:
        features, labels = extract_split(labeled.train, "train features")
        keys = labeled.train.source.keys[features.indices]
        _train(grid, _batches_of_features(features.values.to(device), labels.to(device), keys, settings))
        num_train = len(features.indices)
    else:
        crops = TrainingCrops(weights, labeled, settings, device, size, settings.batch_size, settings.min_crop)
        _train(grid, _batches_of_crops(crops, weights, pool_images, settings))
        num_train = crops.num_readable()
    count, parts = min(5, len(classes)), torch.split(val.values.to(device), TEST_BATCH_SIZE)
    rankings = torch.cat([grid(part).topk(count, dim=-1).indices for part in parts]).cpu()  # n×G×5
    top1 = [100 * (rankings[:, g, 0] == val_labels).double().mean().item() for g in range(len(lrs))]
    best = max(range(len(lrs)), key=top1.__getitem__)
    return (
        accuracies("linear", rankings[:, best], val_labels, classes, prefix)
        | {f"linear_top1_lr{lr:g}": accuracy for lr, accuracy in zip(lrs, top1, strict=True)}
        | {"best_lr": lrs[best], "best_lr_chosen_on": "val"}
        | count_images(labeled, num_train, len(val_labels))
    )
