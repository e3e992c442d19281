"""kNN: the label of an image by a weighted vote of the training images whose features are nearest. No training.

Protocol (DINO's): `[CLS]` of the last block, L2-normalised; k = 10, 20, 100, 200; a neighbour of similarity s votes
with exp(s / 0.07); images resized to 256/224 of the input size (shorter side, bicubic), centre crop.
`knn_top1` is k = 20, always, so that no k is chosen by the labels it is tested on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from adclr.config import Count, Device, Positive, Section, Several, UserError
from adclr.devices import choose
from adclr.evals.features import Features, extract
from adclr.labelled import Labelled, Split, open_labelled
from adclr.weights import Weights, load_weights

HEADLINE_K = 20


class Settings(Section):
    weights: str = Field("", description="a run directory, a file or folder of weights, or timm:NAME")
    partial: bool = Field(False, description="take weights that do not cover the whole backbone")
    data: str = Field("", description="labelled folder: train/ and val/, or one that is split 80/20")
    k: Several[Count] = Field((10, 20, 100, 200), description="numbers of neighbours")
    temperature: Positive = Field(0.07, description="of the votes")
    batch_size: Count = Field(256, description="images at once")
    num_workers: int | None = Field(None, ge=1, description="decoding threads; null: one for each CPU core")
    device: Device = Field("auto", description="auto: the GPU if there is one")


def run(settings: Settings) -> dict[str, float]:
    if not settings.weights or not settings.data:
        raise UserError("knn needs both weights and labelled data; give --weights and --data")
    labelled = open_labelled(settings.data)
    device = choose(settings.device)
    weights = load_weights(settings.weights, settings.partial)
    weights.vit.to(device)
    return score(weights, labelled, settings, device)


def score(
    weights: Weights, labelled: Labelled, settings: Settings, device: torch.device, show: bool = True
) -> dict[str, float]:
    """Accuracies in percent for each k, and how many images they rest on."""

    unreadable = 0

    def features(split: Split, name: str) -> tuple[Tensor, Tensor]:
        nonlocal unreadable
        found: Features = extract(
            weights,
            split.source,
            lambda images: F.normalize(weights.vit(images).cls.float(), dim=-1),
            device,
            settings.batch_size,
            settings.num_workers,
            name=name,
            show=show,
        )
        unreadable += len(found.unreadable)
        labels = torch.from_numpy(split.labels[found.kept])
        empty = sorted(set(split.labels.tolist()) - set(labels.tolist()))
        if empty:
            raise UserError(
                f"no image of class {labelled.classes[empty[0]]} in {split.source.root} can be read; mend or remove it"
            )
        return found.values, labels

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
    scores: dict[str, float] = {}
    for k, ranking in zip(ks, votes, strict=True):
        hits = ranking.cpu() == val_labels.unsqueeze(1)
        scores[f"knn_top1_k{k}"] = 100 * hits[:, 0].float().mean().item()
        scores[f"knn_top5_k{k}"] = 100 * hits[:, :5].any(dim=1).float().mean().item()
    scores["knn_top1"] = scores[f"knn_top1_k{min(HEADLINE_K, len(train))}"]
    return scores | {
        "num_train": float(len(train)),
        "num_val": float(len(val)),
        "num_unreadable": float(unreadable),
    }


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
