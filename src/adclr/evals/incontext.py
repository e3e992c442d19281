"""In-context segmentation: each patch of an image gets the labels of the training patches nearest to it. No training.

Protocol (Hummingbird's): patches of the last block, L2-normalised; a memory of labelled patches of the train images, of
each image as many, drawn so that classes rare in it come often; the k = 30 nearest of a patch are read by a softmax of
their similarities over 0.02; what they say is enlarged to the pixels and the likeliest class taken. Images keep their
proportions, the shorter side at `size`. With `augment_epochs` the memory is of random crops (see `scaled_crops`).
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

from adclr.config.sections import Count, Positive, UserError
from adclr.config.settings import Side
from adclr.data.draws import Draws
from adclr.data.sets.pixels import IGNORE, Segmented
from adclr.evals import iou
from adclr.evals.features import count_unreadable
from adclr.evals.frames import fitting, likeliest, read_frames, resized
from adclr.evals.overlays import Pictures
from adclr.evals.scaled_crops import ScaledCrops
from adclr.evals.task import Pixelwise, begin_pixelwise
from adclr.features.reader import ImageReader, normalizer
from adclr.system import distributed
from adclr.system.devices import autocast_dtype, send
from adclr.system.progress import track
from adclr.weights.backbone import Weights

NUMBERS, ACROSS = 2**28, 2**17  # similarities held at once, and of how many patches of the memory


class Settings(Pixelwise):
    size: Side = Field(512, description="shorter side of the images, pixels; rounded to whole patches")
    memory_size: Count = Field(1_024_000, description="patches in the memory, at most (Hummingbird: 10 240 000)")
    augment_epochs: Annotated[int, Field(ge=0, le=10**6)] = Field(
        0, description="passes of random crops over the train images for the memory; 0: each whole image once"
    )
    k: Count = Field(30, description="neighbours")
    temperature: Positive = Field(0.02, description="of the softmax over their similarities")
    batch_size: Count = Field(16, description="images at once")
    precision: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on a GPU that has it")


def run(settings: Settings, place: Path | None = None) -> dict[str, Any]:
    weights, segmented, device = begin_pixelwise("incontext", settings)
    return score(weights, segmented, settings, device, distributed.is_main(), place)


class Memory(NamedTuple):
    """Labelled patches: what they look like, and what share of each is which class."""

    keys: Tensor  # M×D, of length 1
    labels: Tensor  # M×K


class Encoder:
    """Images in [0, 1] -> features of their patches, of length 1; float16 on a GPU, whose products are fast."""

    def __init__(self, weights: Weights, precision: str, device: torch.device) -> None:
        self.vit, self.normalise = weights.vit, normalizer(weights, device)
        self.dtype = autocast_dtype(precision, device)
        self.kept_as = torch.float16 if device.type == "cuda" else torch.float32

    def __call__(self, images: Tensor, normalised: bool = False) -> Tensor:
        """B×N×D"""
        with torch.autocast(images.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            patches = self.vit(images if normalised else self.normalise(images)).patches
        return F.normalize(patches.float(), dim=-1).to(self.kept_as)


def patch_labels(labels: Tensor, grid: tuple[int, int], patch: int, num_classes: int) -> Tensor:
    """B×height×width -> B×N×K: how many pixels of each patch are of each class; the image resized to its patches."""
    size = grid[0] * patch, grid[1] * patch
    whole = F.interpolate(labels.unsqueeze(1).float(), size=size, mode="nearest-exact").long()
    cells = whole.view(-1, grid[0], patch, grid[1], patch).transpose(2, 3).reshape(len(labels), grid[0] * grid[1], -1)
    cells = torch.where(cells == IGNORE, num_classes, cells)
    counts = torch.zeros(*cells.shape[:2], num_classes + 1, device=labels.device)
    return counts.scatter_add_(2, cells, torch.ones_like(cells, dtype=counts.dtype))[..., :num_classes]


def drawn(counts: Tensor, most: int, uniform: Tensor) -> Tensor:
    """Which of an image's patches, N×K, go into the memory: at most `most`, sorted; those without a label never.

    A patch comes the sooner the rarer its classes are in the image: by how many patches have them, times luck.
    """
    there = (counts > 0).float()
    score = (there @ there.sum(dim=0)) * uniform
    score = torch.where(there.any(dim=1), score, math.inf)
    chosen = score.argsort(stable=True)[:most]
    return chosen[score[chosen] < math.inf].sort().values


@torch.no_grad()
def remember(
    weights: Weights, segmented: Segmented, settings: Settings, device: torch.device, show: bool
) -> tuple[Memory, int]:
    """The memory, of all processes together and in the order of the images, and how many images were unreadable."""
    encode = Encoder(weights, settings.precision, device)
    patch, num_classes = weights.vit.patch_size, len(segmented.classes)
    passes = max(1, settings.augment_epochs)
    most = max(1, settings.memory_size // (passes * len(segmented.train)))
    rows: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(numbers: NDArray[np.int64], draws: Draws, features: Tensor, counts: Tensor) -> None:
        uniform = send(draws.uniform("memory", counts.shape[1]).astype(np.float32), device)
        for place, number in enumerate(numbers.tolist()):
            chosen = drawn(counts[place], most, uniform[place])
            shares = counts[place, chosen] / counts[place, chosen].sum(dim=1, keepdim=True)
            rows[number] = features[place, chosen], shares.to(features.dtype)

    unreadable = 0
    if not settings.augment_epochs:
        reader = _reader(weights, segmented, settings, device, "train")
        for frames in read_frames(reader, settings.batch_size, "memory", show):
            size = fitting(frames.size, settings.size, patch)
            counts = patch_labels(frames.labels, weights.vit.grid_of(*size), patch, num_classes)
            draws = Draws(settings.seed, 0, segmented.train.keys[frames.indices])
            keep(np.array(frames.indices), draws, encode(resized(frames.images, size)), counts)
        unreadable = count_unreadable(reader, settings.max_unreadable)
    else:
        size = fitting((1, 1), settings.size, patch)
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
        with closing(crops.batches(0, steps)) as shown:
            for seen in track(shown, "memory", steps, show):
                inside = np.flatnonzero(seen.places < passes * len(segmented.train))
                counts = patch_labels(seen.labels, weights.vit.grid_of(*size), patch, num_classes)
                keep(seen.places[inside], seen.draws, encode(seen.images, normalised=True), counts)
        unreadable = crops.feed.num_unreadable()
    keys, labels = (_joined(rows, which, (width,), device) for which, width in ((0, weights.vit.dim), (1, num_classes)))
    if not len(keys):
        raise UserError(f"no patch of {segmented.train.root} has a label; see to {segmented.train.labels}")
    return Memory(keys, labels), unreadable


def _joined(rows: dict[int, tuple[Tensor, Tensor]], which: int, width: tuple[int, ...], device: torch.device) -> Tensor:
    """The rows of all processes in the order of their numbers, whoever made them in which batches."""
    own = [rows[number][which] for number in sorted(rows)]
    empty = torch.zeros(0, *width, dtype=torch.float16 if device.type == "cuda" else torch.float32, device=device)
    if distributed.world_size() == 1:
        return torch.cat([empty, *own])
    numbers = torch.cat([torch.full((len(rows[n][which]),), n) for n in sorted(rows)] or [torch.zeros(0).long()])
    found, order = distributed.gather(torch.cat([empty, *own])), distributed.gather(numbers)
    return found[order.argsort(stable=True).to(found.device)]


def ask(memory: Memory, queries: Tensor, k: int, temperature: float) -> Tensor:
    """n×D -> n×K: what the k nearest of the memory say. At most `NUMBERS` similarities at once.

    The nearest are found in the type of the features; what they weigh is then computed in float32.
    """
    k = min(k, len(memory.keys))
    across = min(len(memory.keys), ACROSS)
    said = []
    for part in torch.split(queries, max(1, NUMBERS // across)):
        best = torch.full((len(part), k), -math.inf, dtype=part.dtype, device=part.device)
        nearest = torch.zeros(len(part), k, dtype=torch.int64, device=part.device)
        for first in range(0, len(memory.keys), across):
            similarity = part @ memory.keys[first : first + across].T
            found, places = similarity.topk(min(k, similarity.shape[1]), dim=1)
            found, places = torch.cat([best, found], dim=1), torch.cat([nearest, places + first], dim=1)
            best, order = found.topk(k, dim=1)
            nearest = places.gather(1, order)
        said.append(torch.cat([_read(memory, q, n, temperature) for q, n in _portions(part, nearest)]))
    return torch.cat(said)


def _portions(queries: Tensor, nearest: Tensor) -> list[tuple[Tensor, Tensor]]:
    at_once = max(1, NUMBERS // (8 * nearest.shape[1] * queries.shape[1]))
    return list(zip(torch.split(queries, at_once), torch.split(nearest, at_once), strict=True))


def _read(memory: Memory, queries: Tensor, nearest: Tensor, temperature: float) -> Tensor:
    similarity = torch.einsum("nd,nkd->nk", queries.float(), memory.keys[nearest].float())
    weight = F.softmax(similarity / temperature, dim=1)
    return torch.einsum("nk,nkc->nc", weight, memory.labels[nearest].float())


def _reader(
    weights: Weights, segmented: Segmented, settings: Settings, device: torch.device, split: str
) -> ImageReader:
    pairs = segmented.train if split == "train" else segmented.val
    return ImageReader(pairs, segmented.decoder(weights.decoder), None, device, settings.num_workers)


@torch.no_grad()
def score(
    weights: Weights,
    segmented: Segmented,
    settings: Settings,
    device: torch.device,
    show: bool = True,
    place: Path | None = None,
) -> dict[str, Any]:
    """mIoU, aAcc and mAcc in percent, and how many patches and images they rest on."""
    memory, unreadable = remember(weights, segmented, settings, device, show)
    encode, patch = Encoder(weights, settings.precision, device), weights.vit.patch_size
    tally = iou.Tally(len(segmented.classes), device)
    reader = _reader(weights, segmented, settings, device, "val")
    pictures = Pictures(segmented.classes, settings.pictures if place is not None else 0, len(segmented.val))
    for frames in read_frames(reader, settings.batch_size, "val", show):
        size = fitting(frames.size, settings.size, patch)
        grid = weights.vit.grid_of(*size)
        features = encode(resized(frames.images, size))
        said = ask(memory, features.flatten(0, 1), settings.k, settings.temperature)
        maps = said.view(len(features), *grid, -1).permute(0, 3, 1, 2)
        predicted = likeliest(maps, frames.size)
        tally.add(predicted, frames.labels)
        pictures.add(frames, predicted)
    found = iou.scores("incontext", tally.matrix(), segmented.classes)
    missed = count_unreadable(reader, settings.max_unreadable)
    if place is not None:
        pictures.write(place)
    return found | {
        "num_memory": float(len(memory.keys)),
        "num_train": float(len(segmented.train) - unreadable),
        "num_val": float(len(segmented.val) - missed),
        "num_unreadable": float(unreadable + missed),
    }
