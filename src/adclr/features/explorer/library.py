"""Images that were read once, kept in half precision, and answer any query: where it looks and what it is like."""

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
from adclr.features import analysis, pictures
from adclr.features.analysis import Box, Floats, Grid, Seen
from adclr.model.vit import Memory, VisionTransformer
from adclr.weights.backbone import Weights

# images of one shape that are read, and later asked, at once: few enough for the cache of a CPU, many enough for a GPU
TOGETHER = {"cpu": 16, "cuda": 64}


@dataclass(eq=False)
class Shelf:
    """Images of one shape."""

    grid: Grid
    ids: list[int]
    memory: Memory  # keys and values in half precision; of the tokens, the patches, of length 1
    lengths: dict[Grid, Tensor] = field(default_factory=dict)  # of the mean patch of every window, by their shape

    def patches(self, place: int) -> Tensor:
        """rows×columns×D of one image, each of length 1."""
        return self.memory.tokens.patches[place].float().view(*self.grid, -1)

    def only(self, place: int) -> Memory:
        """What was kept of one image."""
        one = slice(place, place + 1)
        return self.memory._replace(
            keys=[k[one] for k in self.memory.keys], values=[v[one] for v in self.memory.values]
        )

    def match(self, region: Tensor) -> list[tuple[Floats, Box, float]]:
        """Of each image: the cosine of the region's mean patch and that of every window of the region's shape.

        The product of a mean patch is the mean of the patches' products, so windows cost no more than patches; their
        lengths, which a cosine needs too, are computed once for each shape. Returned are, for each patch, the best
        window that it is part of, rows×columns; the best of all, and its cosine.
        """
        size = high, wide = (min(region.shape[0], self.grid[0]), min(region.shape[1], self.grid[1]))
        mean, patches = F.normalize(region.mean(dim=(0, 1)), dim=-1), self.memory.tokens.patches
        if size not in self.lengths:
            held = patches.float().transpose(1, 2).reshape(len(patches), -1, *self.grid)
            self.lengths[size] = F.avg_pool2d(held, size, 1).norm(dim=1, keepdim=True).clamp(min=1e-6)
        found = F.avg_pool2d((patches.float() @ mean).view(-1, 1, *self.grid), size, 1) / self.lengths[size]
        padded = F.pad(found, (wide - 1, wide - 1, high - 1, high - 1), value=-1.0)
        spread = F.max_pool2d(padded, size, 1)[:, 0].cpu().numpy()
        score, place = (part.tolist() for part in found.flatten(1).max(dim=1))
        return list(zip(spread, [_window(at, size, self.grid) for at in place], score, strict=True))


class Answer(NamedTuple):
    """What one image says to a query."""

    id: int
    attention: Floats  # rows×columns, mean 1
    match: Floats  # rows×columns, the cosine of the best window that a patch is part of
    window: Box  # the best
    score: float  # its cosine
    answer: float  # the cosine of the query's answer here and in its own image


class Library:
    """What one network has read. Reading and asking may go on in two threads."""

    def __init__(self, name: str, weights: Weights, size: int | None) -> None:
        self.name, self.weights = name, weights
        self.size = size or min(weights.vit.input_size)
        self.shelves: list[Shelf] = []
        self.seen: dict[int, Seen] = {}
        self.basis: analysis.Basis | None = None
        self.lock = threading.Lock()

    @property
    def vit(self) -> VisionTransformer:
        return self.weights.vit

    @property
    def together(self) -> int:
        return TOGETHER[self.vit.pos_embed.device.type]

    def see(self, name: str, pixels: Pixels) -> Seen:
        return analysis.see(name, pixels, self.size, self.vit.patch_size)

    def bytes_of(self, grid: Grid) -> int:
        """What an image of this shape takes."""
        tokens = grid[0] * grid[1] + self.vit.num_prefix
        return 2 * self.vit.dim * (2 * self.vit.depth * tokens + grid[0] * grid[1])

    # -- reading --

    @torch.no_grad()
    def read(self, ids: Sequence[int], seen: Sequence[Seen]) -> None:
        """Images of one shape."""
        grid = seen[0].grid(self.vit)
        whole = self.vit.read(analysis.normalised(self.weights, np.stack([one.pixels for one in seen])))
        patches = F.normalize(whole.tokens.patches.float(), dim=-1).half()
        tokens = whole.tokens._replace(patches=patches, registers=None)
        memory = Memory([k.half() for k in whole.keys], [v.half() for v in whole.values], tokens)
        with self.lock:
            self.shelves.append(Shelf(grid, list(ids), memory))
            self.seen |= dict(zip(ids, seen, strict=True))
            self.basis = None

    def _at(self, image: int) -> tuple[Shelf, int]:
        for shelf in self.shelves:
            if image in shelf.ids:
                return shelf, shelf.ids.index(image)
        raise KeyError(image)

    # -- asking --

    @torch.no_grad()
    def query(
        self, image: int, box: Box, block: int = -1, head: int | None = None, temperature: float = 1.0
    ) -> list[Answer]:
        """What every image says to a box of one of them; in the order in which they were read."""
        with self.lock:
            home, place = self._at(image)
            crop = analysis.normalised(self.weights, self.seen[image].crop(box, self.vit.patch_size))
            region = home.patches(place)[cells(box, home.grid)]
            own = self.vit.ask(home.only(place), crop.view(1, 1, *crop.shape))[0, 0].float()
            found = []
            for shelf in self.shelves:
                asked = crop.expand(len(shelf.ids), 1, -1, -1, -1)
                attention, answers = self.vit.gaze(shelf.memory, asked, block, temperature)
                maps = self._maps(attention, shelf.grid, head)
                alike = F.cosine_similarity(answers[:, 0].float(), own, dim=-1).tolist()
                for id_, seen, match, answer in zip(shelf.ids, maps, shelf.match(region), alike, strict=True):
                    found.append(Answer(id_, seen, *match, answer))
        return found

    def _maps(self, attention: Tensor, grid: Grid, head: int | None) -> Floats:
        chosen = analysis.over_patches(attention, self.vit.num_prefix, grid)[:, 0 if head is None else 1 + head, 0]
        return chosen.cpu().numpy()

    @torch.no_grad()
    def cls(self, block: int = -1, head: int | None = None, temperature: float = 1.0) -> Iterator[tuple[int, Floats]]:
        """Where `[CLS]` looks in every image."""
        with self.lock:
            for shelf in self.shelves:
                attention, _ = self.vit.gaze(shelf.memory, None, block, temperature)
                yield from zip(shelf.ids, self._maps(attention, shelf.grid, head), strict=True)

    @torch.no_grad()
    def similar(self, image: int, row: int, column: int) -> Floats:
        """The cosines of one patch and all others of its image, rows×columns."""
        with self.lock:
            shelf, place = self._at(image)
            patches = shelf.patches(place)
            return (patches @ patches[row, column]).cpu().numpy()

    @torch.no_grad()
    def components(self) -> Iterator[tuple[int, Floats]]:
        """The first three principal components of all patches, rows×columns×3 in [0, 1], of every image."""
        with self.lock:
            if self.basis is None:
                self.basis = analysis.basis(
                    torch.cat([s.memory.tokens.patches.flatten(0, 1) for s in self.shelves]).cpu()
                )
            for shelf in self.shelves:
                for id_, patches in zip(shelf.ids, shelf.memory.tokens.patches.cpu(), strict=True):
                    yield id_, self.basis.colours(patches).reshape(*shelf.grid, 3)


def cells(box: Box, grid: Grid) -> tuple[slice, slice]:
    """The patches that a box covers by half and more; at least one."""
    found = []
    for low, high, count in ((box[1], box[3], grid[0]), (box[0], box[2], grid[1])):
        first = min(count - 1, max(0, round(low * count)))
        found.append(slice(first, max(first + 1, min(count, round(high * count)))))
    return found[0], found[1]


def _window(at: int, size: Grid, grid: Grid) -> Box:
    top, left = divmod(at, grid[1] - size[1] + 1)
    return left / grid[1], top / grid[0], (left + size[1]) / grid[1], (top + size[0]) / grid[0]


def top_of(values: Floats) -> float:
    """Where the scale of a map of attention ends, as in every picture of ours."""
    return max(pictures.FLAT, float(np.percentile(values, 99.5)))
