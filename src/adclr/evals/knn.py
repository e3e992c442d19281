"""kNN: the label of an image by a weighted vote of its nearest neighbors among the training images. No training.

Protocol (DINO's): `[CLS]` of the last block, L2-normalized; k = 10, 20, 100, 200; a neighbor of similarity s votes with
exp(s / 0.07); images resized to 256/224 of the input size (shorter side, bicubic), center crop. `knn_top1` and the
scores of each class are always those of k = 20, so that no k is chosen by the labels it is tested on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from adclr.config.parsing import Count, Positive, Several
from adclr.data.sets.classes import LabeledImages, Split
from adclr.evals.accuracy import accuracies, count_images
from adclr.evals.features import CenterCrops, compute_features, readable_labels
from adclr.evals.task import ClassificationSettings, open_classification
from adclr.model.named_tensors import Tokens
from adclr.model.vit import VisionTransformer
from adclr.system import distributed
from adclr.system.devices import tensor_float32
from adclr.weights.backbone import Weights

HEADLINE_K = 20


class Settings(ClassificationSettings):
    """Settings of `evaluate knn`."""

    features: Literal["cls", "mean_patch", "both"] = Field(
        "cls", description="features to compare; both: the mean of the two similarities"
    )
    k: Several[Count] = Field((10, 20, 100, 200), description="numbers of neighbors, each of which is scored")
    temperature: Positive = Field(0.07, description="temperature of the votes")
    batch_size: Count = Field(256, description="images per batch")


def run(settings: Settings, prefix: Path | None = None) -> dict[str, Any]:
    """Classify the val images and return the scores."""
    weights, labeled, device = open_classification("knn", settings, networks=True)
    return score(weights, labeled, settings, device, distributed.is_main(), prefix, shared=True)


def pool(vit: VisionTransformer, features: str) -> Callable[[Tensor], Tensor]:
    """Return the function from normalized images to features of length 1."""

    def pool_tokens(images: Tensor) -> Tensor:
        tokens: Tokens = vit(images)
        parts = []
        if features != "mean_patch":
            parts.append(F.normalize(tokens.cls.float(), dim=-1))
        if features != "cls":
            parts.append(F.normalize(tokens.patches.float().mean(dim=1), dim=-1))
        return torch.cat(parts, dim=-1) / math.sqrt(len(parts))

    return pool_tokens


def open_crops(
    weights: Weights,
    labeled: LabeledImages,
    settings: Settings,
    device: torch.device,
    shared: bool = False,
    cache: bool = False,
) -> tuple[CenterCrops, CenterCrops]:
    """Return the center crops of the train and of the val images; with `cache` they stay in memory if they fit."""
    train, val = (
        CenterCrops(
            weights, split.source, device, settings.batch_size, settings.num_workers, shared=shared, cache=cache
        )
        for split in (labeled.train, labeled.val)
    )
    return train, val


def score(
    weights: Weights,
    labeled: LabeledImages,
    settings: Settings,
    device: torch.device,
    show: bool = True,
    prefix: Path | None = None,
    shared: bool = False,
    crops: tuple[CenterCrops, CenterCrops] | None = None,
    fast: bool = False,
) -> dict[str, Any]:
    """Return accuracies in percent for each k, and the numbers of images; `shared`: several processes take part.

    Those who score the same images again and again can keep them (`crops`, of `open_crops`) and compute features in
    TensorFloat-32 on a GPU (`fast`).
    """

    def extract_split(split: Split, crops: CenterCrops, name: str) -> tuple[Tensor, Tensor]:
        features = compute_features(crops, pool(weights.vit, settings.features), name, show)
        return features.values, readable_labels(features, split, labeled.classes, settings.max_unreadable)

    train_crops, val_crops = crops or open_crops(weights, labeled, settings, device, shared)
    with tensor_float32(device) if fast else nullcontext():
        train, train_labels = extract_split(labeled.train, train_crops, "train features")
        val, val_labels = extract_split(labeled.val, val_crops, "val features")
    ks = tuple(sorted({min(k, len(train)) for k in (*settings.k, HEADLINE_K)}))
    num_classes, temperature = len(labeled.classes), settings.temperature
    rankings = vote(train.to(device), train_labels.to(device), val.to(device), num_classes, ks, temperature)
    scores: dict[str, Any] = {}
    for k, ranking in zip(ks, rankings, strict=True):
        hits = ranking.cpu() == val_labels.unsqueeze(1)
        scores[f"knn_top1_k{k}"] = 100 * hits[:, 0].double().mean().item()
        scores[f"knn_top5_k{k}"] = 100 * hits[:, :5].any(dim=1).double().mean().item()
    headline = rankings[ks.index(min(HEADLINE_K, len(train)))]
    counts = count_images(labeled, len(train), len(val))
    return scores | accuracies("knn", headline, val_labels, labeled.classes, prefix) | counts


def vote(
    train: Tensor,
    labels: Tensor,
    val: Tensor,
    num_classes: int,
    ks: tuple[int, ...],
    temperature: float,
    chunk: int = 1024,
) -> list[Tensor]:
    """Return for each k the classes of each val image from most to least votes.

    At most chunk×len(train) similarities are in memory at once.
    """
    rankings: list[list[Tensor]] = [[] for _ in ks]
    for part in torch.split(val, chunk):
        similarity, nearest = (part @ train.T).topk(max(ks), dim=1)
        # the nearest votes with 1: same ranking as exp(s / temperature), which overflows for temperatures below 0.012
        weight = torch.exp((similarity - similarity[:, :1]) / temperature)
        for ranking, k in zip(rankings, ks, strict=True):
            votes = torch.zeros(len(part), num_classes, device=part.device, dtype=weight.dtype)
            votes.scatter_add_(1, labels[nearest[:, :k]], weight[:, :k])
            ranking.append(votes.argsort(dim=1, descending=True, stable=True))
    return [torch.cat(ranking) for ranking in rankings]
