"""Images that a network has read once, in half precision, and their answers to queries: attention and matches."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adclr.data.decode import Pixels
from adclr.features import analysis
from adclr.features.analysis import Box, Floats, Grid, InputImage
from adclr.model.named_tensors import Memory
from adclr.model.vit import VisionTransformer
from adclr.weights.backbone import Weights

# images of one shape read, and later queried, at once: few enough for the cache of a CPU, many enough for a GPU
BATCH_SIZE = {"cpu": 16, "cuda": 64}


@dataclass(eq=False)
class ImageGroup:
    """Images of one shape."""

    grid: Grid
    ids: list[int]
    memory: Memory  # keys and values in half precision; of the tokens, the patches, of length 1
    lengths: dict[Grid, Tensor] = field(default_factory=dict)  # of the mean patch of every window, by their shape

    def patches(self, position: int) -> Tensor:
        """Return the patch features of one image, rows×columns×D, each of length 1."""
        return self.memory.tokens.patches[position].float().view(*self.grid, -1)

    def only(self, position: int) -> Memory:
        """Return the memory of one image."""
        one = slice(position, position + 1)
        return self.memory._replace(
            keys=[k[one] for k in self.memory.keys], values=[v[one] for v in self.memory.values]
        )

    def match(self, region: Tensor) -> list[tuple[Floats, Box, float]]:
        """Return, for each image, how similar its windows of the region's shape are to the region.

        Compared are mean patches, by their cosine. The product of a mean patch is the mean of the patches' products, so
        windows cost no more than patches; their lengths, which a cosine needs too, are computed once for each shape.
        Returned are the cosine of the best window that each patch is part of, rows×columns; the best window of all,
        and its cosine.
        """
        size = height, width = (min(region.shape[0], self.grid[0]), min(region.shape[1], self.grid[1]))
        mean, patches = F.normalize(region.mean(dim=(0, 1)), dim=-1), self.memory.tokens.patches
        if size not in self.lengths:
            maps = patches.float().transpose(1, 2).reshape(len(patches), -1, *self.grid)
            self.lengths[size] = F.avg_pool2d(maps, size, 1).norm(dim=1, keepdim=True).clamp(min=1e-6)
        cosines = F.avg_pool2d((patches.float() @ mean).view(-1, 1, *self.grid), size, 1) / self.lengths[size]
        padded = F.pad(cosines, (width - 1, width - 1, height - 1, height - 1), value=-1.0)
        best = F.max_pool2d(padded, size, 1)[:, 0].cpu().numpy()
        scores, positions = (part.tolist() for part in cosines.flatten(1).max(dim=1))
        return list(zip(best, [_window(position, size, self.grid) for position in positions], scores, strict=True))


class Answer(NamedTuple):
    """The answer of one image to a query."""

    id: int
    attention: Floats  # rows×columns, mean 1
    match: Floats  # rows×columns, the cosine of the best window that a patch is part of
    window: Box  # the best of all
    score: float  # its cosine
    answer: float  # the cosine of the query's answer here and in its own image


class Library:
    """The images that one network has read. They may be read and queried by two threads at a time."""

    def __init__(self, name: str, weights: Weights, size: int | None) -> None:
        self.name, self.weights = name, weights
        self.size = size or min(weights.vit.input_size)
        self.groups: list[ImageGroup] = []
        self.inputs: dict[int, InputImage] = {}  # by id
        self.basis: analysis.Basis | None = None
        self.lock = threading.Lock()

    @property
    def vit(self) -> VisionTransformer:
        """Return the network."""
        return self.weights.vit

    @property
    def batch_size(self) -> int:
        """Return how many images of one shape are read at once."""
        return BATCH_SIZE[self.vit.cls_token.device.type]

    def prepare(self, pixels: Pixels) -> InputImage:
        """Return an image resized for the network."""
        return analysis.prepare_image("", pixels, self.size, self.vit.patch_size)

    def bytes_of(self, grid: Grid) -> int:
        """Return the memory that an image of this shape takes."""
        tokens = grid[0] * grid[1] + self.vit.num_prefix
        blocks = self.vit.depth + self.vit.class_attention
        return 2 * self.vit.dim * (2 * blocks * tokens + grid[0] * grid[1])

    # -- reading --

    @torch.no_grad()
    def read(self, ids: Sequence[int], images: Sequence[InputImage]) -> None:
        """Read images of one shape."""
        grid = images[0].grid(self.vit)
        full = self.vit.read(analysis.network_input(self.weights, np.stack([image.pixels for image in images])))
        patches = F.normalize(full.tokens.patches.float(), dim=-1).half()
        tokens = full.tokens._replace(patches=patches, registers=None)
        memory = Memory([k.half() for k in full.keys], [v.half() for v in full.values], tokens)
        with self.lock:
            self.groups.append(ImageGroup(grid, list(ids), memory))
            self.inputs |= dict(zip(ids, images, strict=True))
            self.basis = None

    def _find(self, image: int) -> tuple[ImageGroup, int]:
        """Return the group of an image and its position there."""
        for group in self.groups:
            if image in group.ids:
                return group, group.ids.index(image)
        raise KeyError(image)

    # -- queries --

    @torch.no_grad()
    def query(
        self, image: int, box: Box, block: int = -1, head: int | None = None, temperature: float = 1.0
    ) -> list[Answer]:
        """Return the answers of all images to a box of one of them, in the order in which they were read."""
        with self.lock:
            home, position = self._find(image)
            crop = analysis.network_input(self.weights, self.inputs[image].crop(box, self.vit.patch_size))
            region = home.patches(position)[covered_patches(box, home.grid)]
            home_answer = self.vit.ask(home.only(position), crop.view(1, 1, *crop.shape))[0, 0].float()
            answers = []
            for group in self.groups:
                queries = crop.expand(len(group.ids), 1, -1, -1, -1)
                attention, tokens = self.vit.gaze(group.memory, queries, block, temperature)
                maps = self._maps(attention, group.grid, head)
                cosines = F.cosine_similarity(tokens[:, 0].float(), home_answer, dim=-1).tolist()
                for id_, values, match, cosine in zip(group.ids, maps, group.match(region), cosines, strict=True):
                    answers.append(Answer(id_, values, *match, cosine))
        return answers

    def _maps(self, attention: Tensor, grid: Grid, head: int | None) -> Floats:
        maps = analysis.patch_attention(attention, self.vit.num_prefix, grid)
        return maps[:, 0 if head is None else 1 + head, 0].cpu().numpy()

    @torch.no_grad()
    def cls(self, block: int = -1, head: int | None = None, temperature: float = 1.0) -> Iterator[tuple[int, Floats]]:
        """Yield the attention of `[CLS]`, rows×columns, of every image."""
        with self.lock:
            for group in self.groups:
                attention, _ = self.vit.gaze(group.memory, None, block, temperature)
                yield from zip(group.ids, self._maps(attention, group.grid, head), strict=True)

    @torch.no_grad()
    def similar(self, image: int, row: int, column: int) -> Floats:
        """Return the cosines of one patch and all patches of its image, rows×columns."""
        with self.lock:
            group, position = self._find(image)
            patches = group.patches(position)
            return (patches @ patches[row, column]).cpu().numpy()

    @torch.no_grad()
    def components(self) -> Iterator[tuple[int, Floats]]:
        """Yield the first three principal components of all patches, rows×columns×3 in [0, 1], of every image."""
        with self.lock:
            if self.basis is None:
                patches = [group.memory.tokens.patches.flatten(0, 1) for group in self.groups]
                self.basis = analysis.fit_basis(torch.cat(patches).cpu())
            for group in self.groups:
                for id_, patches in zip(group.ids, group.memory.tokens.patches.cpu(), strict=True):
                    yield id_, self.basis.colors(patches).reshape(*group.grid, 3)


def covered_patches(box: Box, grid: Grid) -> tuple[slice, slice]:
    """Return the rows and columns of patches that a box covers by half or more; at least one of each."""
    spans = []
    for low, high, count in ((box[1], box[3], grid[0]), (box[0], box[2], grid[1])):
        first = min(count - 1, max(0, round(low * count)))
        spans.append(slice(first, max(first + 1, min(count, round(high * count)))))
    return spans[0], spans[1]


def _window(position: int, size: Grid, grid: Grid) -> Box:
    top, left = divmod(position, grid[1] - size[1] + 1)
    return left / grid[1], top / grid[0], (left + size[1]) / grid[1], (top + size[0]) / grid[0]
