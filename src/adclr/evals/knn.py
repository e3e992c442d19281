"""kNN: the label of an image by a weighted vote of the training images whose features are nearest. No training.

Protocol (DINO's): `[CLS]` of the last block, L2-normalised; k = 10, 20, 100, 200; a neighbour of similarity s votes
with exp(s / 0.07); images resized to 256/224 of the input size (shorter side, bicubic), centre crop.
`knn_top1` is k = 20, always, so that no k is chosen by the labels it is tested on; so are the numbers of each class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from adclr.config.sections import Count, Positive, Several
from adclr.data.sets.classes import Labelled, Split
from adclr.evals.accuracy import accuracies
from adclr.evals.features import extract, labels_of
from adclr.evals.task import Task, begin
from adclr.model.vit import Tokens, VisionTransformer
from adclr.system import distributed
from adclr.weights.backbone import Weights

HEADLINE_K = 20


class Settings(Task):
    features: Literal["cls", "mean_patch", "both"] = Field(
        "cls", description="both: the similarity is the mean of that of [CLS] and that of the mean patch"
    )
    k: Several[Count] = Field((10, 20, 100, 200), description="numbers of neighbours")
    temperature: Positive = Field(0.07, description="of the votes")
    batch_size: Count = Field(256, description="images at once")


def run(settings: Settings, place: Path | None = None) -> dict[str, Any]:
    weights, labelled, device = begin("knn", settings)
    return score(weights, labelled, settings, device, distributed.is_main(), place, shared=True)


def pool(vit: VisionTransformer, features: str) -> Callable[[Tensor], Tensor]:
    """Images -> features of length 1."""

    def pooled(images: Tensor) -> Tensor:
        tokens: Tokens = vit(images)
        parts = []
        if features != "mean_patch":
            parts.append(F.normalize(tokens.cls.float(), dim=-1))
        if features != "cls":
            parts.append(F.normalize(tokens.patches.float().mean(dim=1), dim=-1))
        return torch.cat(parts, dim=-1) / math.sqrt(len(parts))

    return pooled


def score(
    weights: Weights,
    labelled: Labelled,
    settings: Settings,
    device: torch.device,
    show: bool = True,
    place: Path | None = None,
    shared: bool = False,
) -> dict[str, Any]:
    """Accuracies in percent for each k, and how many images they rest on; `shared`: several processes take part."""

    def features(split: Split, name: str) -> tuple[Tensor, Tensor]:
        found = extract(
            weights,
            split.source,
            pool(weights.vit, settings.features),
            device,
            settings.batch_size,
            settings.num_workers,
            name=name,
            show=show,
            shared=shared,
        )
        return found.values, labels_of(found, split, labelled.classes, settings.max_unreadable)

    train, train_labels = features(labelled.train, "train features")
    val, val_labels = features(labelled.val, "val features")
    ks = tuple(sorted({min(k, len(train)) for k in (*settings.k, HEADLINE_K)}))
    votes = vote(
        train.to(device),
        train_labels.to(device),
        val.to(device),
        len(labelled.classes),
        ks,
        settings.temperature,
    )
    scores: dict[str, Any] = {}
    for k, ranking in zip(ks, votes, strict=True):
        hits = ranking.cpu() == val_labels.unsqueeze(1)
        scores[f"knn_top1_k{k}"] = 100 * hits[:, 0].double().mean().item()
        scores[f"knn_top5_k{k}"] = 100 * hits[:, :5].any(dim=1).double().mean().item()
    headline = votes[ks.index(min(HEADLINE_K, len(train)))]
    num_images = len(labelled.train.labels) + len(labelled.val.labels)
    return (
        scores
        | accuracies("knn", headline, val_labels, labelled.classes, place)
        | {
            "num_train": float(len(train)),
            "num_val": float(len(val)),
            "num_unreadable": float(num_images - len(train) - len(val)),
        }
    )


def vote(
    train: Tensor,
    labels: Tensor,
    val: Tensor,
    num_classes: int,
    ks: tuple[int, ...],
    temperature: float,
    chunk: int = 1024,
) -> list[Tensor]:
    """For each k, the classes of each val image from most to least voted; at most chunk×len(train) numbers at once."""
    rankings: list[list[Tensor]] = [[] for _ in ks]
    for part in torch.split(val, chunk):
        similarity, nearest = (part @ train.T).topk(max(ks), dim=1)
        # the nearest votes with 1: the ranking is that of exp(s / temperature), which overflows below 0.012
        weight = torch.exp((similarity - similarity[:, :1]) / temperature)
        for ranking, k in zip(rankings, ks, strict=True):
            votes = torch.zeros(len(part), num_classes, device=part.device, dtype=weight.dtype)
            votes.scatter_add_(1, labels[nearest[:, :k]], weight[:, :k])
            ranking.append(votes.argsort(dim=1, descending=True, stable=True))
    return [torch.cat(ranking) for ranking in rankings]
