"""In-context segmentation: each patch gets the labels of its nearest neighbors among training patches. No training.

Protocol (Hummingbird's): patches of the last block, L2-normalized; a memory of labeled patches of the train images, the
same number of each image, sampled in favor of classes that are rare in it; the labels of the k = 30 nearest neighbors
are averaged by a softmax of their similarities over 0.02; the averages are upsampled to pixels, which get the likeliest
class. Images keep their aspect ratio, the shorter side at `size`. With `augment_epochs` the memory is of random crops
(see `scaled_crops`).
"""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from adclr.config.parsing import Count, Positive, Side, UserError, setting
from adclr.data.random_draws import Draws
from adclr.data.sets.pixels import IGNORE, Segmented
from adclr.evals import iou
from adclr.evals.features import count_unreadable
from adclr.evals.frames import fit_size, most_likely_class, read_frames, resize_images
from adclr.evals.overlays import Overlays
from adclr.evals.scaled_crops import ScaledCrops
from adclr.evals.task import PixelSettings, open_pixels
from adclr.features.reader import ImageReader, normalizer
from adclr.system import distributed
from adclr.system.devices import autocast_dtype, send
from adclr.system.progress import track
from adclr.weights.backbone import Weights

MAX_SIMILARITIES, MAX_KEYS = 2**28, 2**17  # in memory at once, and the memory patches they are with


class Settings(PixelSettings):
    """Settings of `evaluate incontext`."""

    size: Side = Field(512, description="shorter side of the images, pixels, rounded to whole patches")
    memory_size: Count = Field(1_024_000, description="limit of patches in the memory (Hummingbird: 10 240 000)")
    augment_epochs: Annotated[int, Field(ge=0, le=10**6)] = Field(
        0, description="passes of random crops over the train images for the memory; 0: each whole image once"
    )
    k: Count = Field(30, description="number of neighbors")
    temperature: Positive = Field(0.02, description="temperature of the softmax over the neighbors' similarities")
    batch_size: Count = Field(16, description="images per batch")
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "auto: bfloat16 on a GPU that has it", free=["study"]
    )


def run(settings: Settings, prefix: Path | None = None) -> dict[str, Any]:
    """Segment the val images and return the scores."""
    weights, segmented, device = open_pixels("incontext", settings, networks=True)
    return score(weights, segmented, settings, device, distributed.is_main(), prefix)


class PatchMemory(NamedTuple):
    """Features of labeled patches, and the share of each class in their pixels."""

    keys: Tensor  # M×D, of length 1
    labels: Tensor  # M×K


class Encoder:
    """Computes features of length 1 of the patches of images; float16 on a GPU, where it makes similarities fast."""

    def __init__(self, weights: Weights, precision: str, device: torch.device) -> None:
        self.vit, self.normalize = weights.vit, normalizer(weights, device)
        self.autocast_dtype, self.feature_dtype = autocast_dtype(precision, device), _feature_dtype(device)

    def __call__(self, images: Tensor, normalized: bool = False) -> Tensor:
        """Return features B×N×D of images in [0, 1], or of normalized ones."""
        dtype = self.autocast_dtype
        with torch.autocast(images.device.type, dtype=dtype, enabled=dtype is not None):
            patches = self.vit(images if normalized else self.normalize(images)).patches
        return F.normalize(patches.float(), dim=-1).to(self.feature_dtype)


def _feature_dtype(device: torch.device) -> torch.dtype:
    """Return the type of features on a device."""
    return torch.float16 if device.type == "cuda" else torch.float32


def patch_labels(labels: Tensor, grid: tuple[int, int], patch: int, num_classes: int) -> Tensor:
    """Return the number of pixels of each class in each patch, B×N×K, of labels B×height×width resized to the grid."""
    size = grid[0] * patch, grid[1] * patch
    resized_labels = F.interpolate(labels.unsqueeze(1).float(), size=size, mode="nearest-exact").long()
    cells = resized_labels.view(-1, grid[0], patch, grid[1], patch).transpose(2, 3)
    cells = cells.reshape(len(labels), grid[0] * grid[1], -1)
    cells = torch.where(cells == IGNORE, num_classes, cells)
    counts = torch.zeros(*cells.shape[:2], num_classes + 1, device=labels.device)
    return counts.scatter_add_(2, cells, torch.ones_like(cells, dtype=counts.dtype))[..., :num_classes]


def sample_patches(counts: Tensor, max_patches: int, uniform: Tensor) -> Tensor:
    """Return the sorted indices of an image's patches for the memory; `counts` are N×K pixels, `uniform` N numbers.

    Patches are taken in the order of a random number times how common their classes are in the image, by the number of
    patches that have them; patches without a label are never taken.
    """
    present = (counts > 0).float()
    order_by = (present @ present.sum(dim=0)) * uniform
    order_by = torch.where(present.any(dim=1), order_by, math.inf)
    chosen = order_by.argsort(stable=True)[:max_patches]
    return chosen[order_by[chosen] < math.inf].sort().values


@torch.no_grad()
def _build_memory(
    weights: Weights, segmented: Segmented, settings: Settings, device: torch.device, show: bool
) -> tuple[PatchMemory, int]:
    """Return the memory of all processes, in the order of the images, and the number of unreadable images."""
    encode = Encoder(weights, settings.precision, device)
    patch, num_classes = weights.vit.patch_size, len(segmented.classes)
    passes = max(1, settings.augment_epochs)
    max_patches = max(1, settings.memory_size // (passes * len(segmented.train)))
    rows: dict[int, tuple[Tensor, Tensor]] = {}  # features and labels by the position of the image

    def add_images(positions: NDArray[np.int64], draws: Draws, features: Tensor, counts: Tensor) -> None:
        uniform = send(draws.uniform("memory", counts.shape[1]).astype(np.float32), device)
        for number, position in enumerate(positions.tolist()):
            chosen = sample_patches(counts[number], max_patches, uniform[number])
            shares = counts[number, chosen] / counts[number, chosen].sum(dim=1, keepdim=True)
            rows[position] = features[number, chosen], shares.to(features.dtype)

    if not settings.augment_epochs:
        reader = _reader(weights, segmented, settings, device, "train")
        for frames in read_frames(reader, settings.batch_size, "memory", show):
            size = fit_size(frames.size, settings.size, patch)
            counts = patch_labels(frames.labels, weights.vit.grid_of(*size), patch, num_classes)
            draws = Draws(settings.seed, 0, segmented.train.keys[frames.indices])
            add_images(np.array(frames.indices), draws, encode(resize_images(frames.images, size)), counts)
        num_unreadable = count_unreadable(reader, settings.max_unreadable)
    else:
        size = fit_size((1, 1), settings.size, patch)
        crops = ScaledCrops(
            weights,
            segmented.train,
            segmented.decoder(weights.decoder, 2 * size[0]),
            device,
            size[0],
            distributed.world_size() * min(settings.batch_size, len(segmented.train)),
            settings.seed,
            num_workers=settings.num_workers,
            max_unreadable=settings.max_unreadable,
        )
        steps = -(-passes * len(segmented.train) // crops.batch_size)
        with closing(crops.batches(0, steps)) as batches:
            for batch in track(batches, "memory", steps, show):
                inside = np.flatnonzero(batch.positions < passes * len(segmented.train))
                counts = patch_labels(batch.labels, weights.vit.grid_of(*size), patch, num_classes)
                add_images(batch.positions[inside], batch.draws, encode(batch.images, normalized=True), counts)
        num_unreadable = crops.feed.num_unreadable()
    parts = [rows[position] for position in sorted(rows)]
    counts = torch.tensor([len(keys) for keys, _ in parts], dtype=torch.int64)
    positions = torch.tensor(sorted(rows), dtype=torch.int64).repeat_interleave(counts)
    keys = _gather_rows([keys for keys, _ in parts], positions, weights.patch_dim, device)
    labels = _gather_rows([labels for _, labels in parts], positions, num_classes, device)
    if not len(keys):
        raise UserError(f"no patch of {segmented.train.root} has a label; check {segmented.train.labels}")
    return PatchMemory(keys, labels), num_unreadable


def _gather_rows(parts: list[Tensor], positions: Tensor, width: int, device: torch.device) -> Tensor:
    """Return the rows of all processes, sorted by their positions."""
    rows = torch.cat([torch.zeros(0, width, dtype=_feature_dtype(device), device=device), *parts])
    if distributed.world_size() == 1:
        return rows
    all_rows, all_positions = distributed.gather(rows), distributed.gather(positions)
    return all_rows[all_positions.argsort(stable=True).to(all_rows.device)]


def predict_labels(memory: PatchMemory, queries: Tensor, k: int, temperature: float) -> Tensor:
    """Return n×K, the class shares of n×D queries: weighted means over their k nearest neighbors in the memory.

    At most `MAX_SIMILARITIES` are in memory at once. Neighbors are searched in the type of the features, their weights
    computed in float32.
    """
    k = min(k, len(memory.keys))
    keys_at_once = min(len(memory.keys), MAX_KEYS)
    predictions = []
    for part in torch.split(queries, max(1, MAX_SIMILARITIES // keys_at_once)):
        best = torch.full((len(part), k), -math.inf, dtype=part.dtype, device=part.device)
        nearest = torch.zeros(len(part), k, dtype=torch.int64, device=part.device)
        for first in range(0, len(memory.keys), keys_at_once):
            similarity = part @ memory.keys[first : first + keys_at_once].T
            top, indices = similarity.topk(min(k, similarity.shape[1]), dim=1)
            top, indices = torch.cat([best, top], dim=1), torch.cat([nearest, indices + first], dim=1)
            best, order = top.topk(k, dim=1)
            nearest = indices.gather(1, order)
        at_once = max(1, MAX_SIMILARITIES // (8 * k * part.shape[1]))
        for queries, neighbors in zip(torch.split(part, at_once), torch.split(nearest, at_once), strict=True):
            predictions.append(_average_labels(memory, queries, neighbors, temperature))
    return torch.cat(predictions)


def _average_labels(memory: PatchMemory, queries: Tensor, nearest: Tensor, temperature: float) -> Tensor:
    """Return the labels of the nearest neighbors, weighted by the softmax of their similarities."""
    similarity = torch.einsum("nd,nkd->nk", queries.float(), memory.keys[nearest].float())
    weight = F.softmax(similarity / temperature, dim=1)
    return torch.einsum("nk,nkc->nc", weight, memory.labels[nearest].float())


def _reader(
    weights: Weights, segmented: Segmented, settings: Settings, device: torch.device, split: str
) -> ImageReader:
    """Return the reader of a split."""
    pairs = segmented.train if split == "train" else segmented.val
    return ImageReader(pairs, segmented.decoder(weights.decoder), None, device, settings.num_workers)


@torch.no_grad()
def score(
    weights: Weights,
    segmented: Segmented,
    settings: Settings,
    device: torch.device,
    show: bool = True,
    prefix: Path | None = None,
) -> dict[str, Any]:
    """Return mIoU, aAcc and mAcc in percent, and the numbers of patches and images."""
    memory, unreadable_train = _build_memory(weights, segmented, settings, device, show)
    encode, patch = Encoder(weights, settings.precision, device), weights.vit.patch_size
    confusion = iou.Confusion(len(segmented.classes), device)
    reader = _reader(weights, segmented, settings, device, "val")
    overlays = Overlays(segmented.classes, settings.pictures, len(segmented.val), prefix)
    for frames in read_frames(reader, settings.batch_size, "val", show):
        size = fit_size(frames.size, settings.size, patch)
        features = encode(resize_images(frames.images, size))
        shares = predict_labels(memory, features.flatten(0, 1), settings.k, settings.temperature)
        maps = shares.view(len(features), *weights.vit.grid_of(*size), -1).permute(0, 3, 1, 2)
        predicted = most_likely_class(maps, frames.size)
        confusion.add(predicted, frames.labels)
        overlays.add(frames, predicted)
    scores = iou.scores("incontext", confusion.matrix(), segmented.classes)
    unreadable_val = count_unreadable(reader, settings.max_unreadable)
    overlays.write()
    return scores | {
        "num_memory": float(len(memory.keys)),
        "num_train": float(len(segmented.train) - unreadable_train),
        "num_val": float(len(segmented.val) - unreadable_val),
        "num_unreadable": float(unreadable_train + unreadable_val),
    }
