"""What a backbone looks at and what it finds alike, as numbers; `pictures` draws them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from adclr.config.sections import UserError
from adclr.data.decode import Pixels
from adclr.data.draws import Draws, crop_boxes
from adclr.features.reader import normalizer
from adclr.model.vit import Memory, VisionTransformer
from adclr.system.devices import send
from adclr.weights.backbone import Weights, load_weights

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Box = tuple[float, float, float, float]  # left, top, right, bottom as shares of the width and the height
Grid = tuple[int, int]  # patches down and across
LONGEST = 4  # times the shorter side; a longer image is shrunk further, so that its patches stay few
NEAR = 0.08  # of the width and height: how far a match tells where its neighbours are
CHUNK = 1024  # patches compared with all others at once


def load(name: str, device: torch.device) -> Weights:
    """Weights that can be looked at."""
    weights = load_weights(name, partial=None)
    if weights.vit.query_keys == "all":
        raise UserError(f"{name} has model.query_keys=all, so that nothing can be read before its queries; use others")
    weights.vit.to(device)
    return weights


class Seen(NamedTuple):
    """An image as it is looked at: resized so that patches fill it."""

    name: str
    pixels: Pixels  # C×height×width
    label: str | None = None

    def grid(self, vit: VisionTransformer) -> Grid:
        return vit.grid_of(*self.pixels.shape[1:])

    def crop(self, box: Box, side: int) -> Pixels:
        """The query crop of a box, C×side×side."""
        height, width = self.pixels.shape[1:]
        edges = box[0] * width, box[1] * height, box[2] * width, box[3] * height
        return _resized(self.pixels, side, side, edges)


def see(name: str, pixels: Pixels, size: int, patch: int, label: str | None = None) -> Seen:
    """Resizes the shorter side to about `size` pixels and both sides to whole patches; the shape is kept up to that."""
    height, width = pixels.shape[1:]
    scale = min(size / min(height, width), LONGEST * size / max(height, width))
    rows, columns = (max(1, round(side * scale / patch)) * patch for side in (height, width))
    return Seen(name, pixels if (rows, columns) == (height, width) else _resized(pixels, rows, columns), label)


def _resized(pixels: Pixels, height: int, width: int, box: Box | None = None) -> Pixels:
    bicubic = Image.Resampling.BICUBIC
    channels = (Image.fromarray(channel).resize((width, height), bicubic, box) for channel in pixels)
    return np.stack([np.asarray(channel) for channel in channels])


def drawn_boxes(
    seen: Seen, key: int, count: int, scale: tuple[float, float] = (0.05, 0.15), seed: int = 0
) -> list[Box]:
    """Queries drawn as in training, a function of the key and the seed: `scale` is the area, of the image's."""
    height, width = seen.pixels.shape[1:]
    draws = Draws(seed, 0, np.array([key], np.uint64))
    (drawn,) = crop_boxes(draws, "query", count, np.array([[height, width]]), scale, (3 / 4, 4 / 3))
    return [(x / width, y / height, (x + w) / width, (y + h) / height) for y, x, h, w in drawn.tolist()]


def network_input(weights: Weights, pixels: Pixels) -> Tensor:
    """Return normalized images of uint8 pixels, ...×C×height×width, on the device of the network."""
    device = weights.vit.pos_embed.device
    return normalizer(weights, device)(send(pixels, device))


@torch.no_grad()
def read(weights: Weights, seen: Seen) -> Memory:
    return weights.vit.read(network_input(weights, seen.pixels[None]))


@torch.no_grad()
def features(weights: Weights, seen: Seen, block: int = -1) -> Tensor:
    """N×D, the patches after a block and the last norm, float32 on the CPU."""
    (tokens,) = weights.vit.intermediate(network_input(weights, seen.pixels[None]), [block])
    return tokens.patches[0].float().cpu()


# -- attention --


@torch.no_grad()
def gaze(
    weights: Weights, seen: Seen, memory: Memory, crops: Pixels | None = None, block: int = -1
) -> tuple[Floats, Tensor]:
    """(maps, (1+H)×Q×rows×columns: the mean of the heads, then each; the answers, Q×D), of crops or of `[CLS]`."""
    queries = None if crops is None else network_input(weights, crops).unsqueeze(0)
    attention, answers = weights.vit.gaze(memory, queries, block)
    maps = patch_attention(attention, weights.vit.num_prefix, seen.grid(weights.vit))
    return maps[0].cpu().numpy(), answers[0].float().cpu()


def patch_attention(attention: Tensor, num_prefix: int, grid: Grid) -> Tensor:
    """B×H×Q×T attention -> B×(1+H)×Q×rows×columns, first the mean of the heads; each map has the mean 1.

    So a number says how many times as much a patch is attended to as if all patches were attended to alike.
    """
    patches = attention[..., num_prefix : num_prefix + grid[0] * grid[1]]
    maps = torch.cat([patches.mean(dim=1, keepdim=True), patches], dim=1)
    even = maps / maps.mean(dim=-1, keepdim=True).clamp(min=1e-20)
    return even.view(*even.shape[:-1], *grid)


def heaviest(values: Floats, share: float) -> NDArray[np.bool_]:
    """The fewest patches that together hold a share of the map, as DINO shows attention."""
    flat = values.ravel()
    order = np.argsort(-flat, kind="stable")
    before = np.cumsum(flat[order], dtype=np.float64) - flat[order]
    kept = np.zeros(flat.size, np.bool_)
    kept[order] = before < share * flat.sum(dtype=np.float64)
    return kept.reshape(values.shape)


def enlarged(values: Floats, height: int, width: int) -> Floats:
    """A map of patches as one of pixels: cubic in between, the middle of a patch where it is in the image."""
    found = Image.fromarray(values.astype(np.float32)).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(found, np.float32).clip(values.min(), values.max())


# -- what is alike --


def similarity(one: Tensor, many: Tensor) -> Tensor:
    """...×D and N×D -> ...×N cosines."""
    return F.normalize(one, dim=-1) @ F.normalize(many, dim=-1).T


class Matches(NamedTuple):
    """Pairs of patches, each the other's nearest, the most alike first."""

    first: Ints  # place in the grid of the first image, row by row
    second: Ints
    cosine: Floats


def mutual(first: Tensor, second: Tensor) -> Matches:
    """N×D and M×D features -> the mutual nearest neighbours by cosine; at most a chunk times M numbers at once."""
    there, cosine = _nearest(first, second)
    back, _ = _nearest(second, first)
    here = torch.arange(len(first))
    both = back[there] == here
    order = cosine[both].argsort(descending=True, stable=True)
    return Matches(here[both][order].numpy(), there[both][order].numpy(), cosine[both][order].numpy())


def _nearest(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the second each of the first is nearest to, and their cosine."""
    found = [similarity(part, second).max(dim=1) for part in torch.split(first, CHUNK)]
    return torch.cat([best.indices for best in found]), torch.cat([best.values for best in found])


def centres(grid: Grid) -> Floats:
    """N×2: (x, y) of the middle of each patch as shares of the width and the height."""
    y, x = np.meshgrid(*((np.arange(n) + 0.5) / n for n in grid), indexing="ij")
    return np.stack([x, y], axis=-1).reshape(-1, 2).astype(np.float32)


def flow(matches: Matches, first: Grid, second: Grid) -> Floats:
    """rows×columns×2: for each patch of the first image, where in the second it is.

    The shift of each patch is the mean of those of the matches, weighed by likeness and by nearness in the first image
    (a Gaussian of 8 % of its sides), so that one false match among right ones does little.
    """
    here, there = centres(first), centres(second)
    shift = there[matches.second] - here[matches.first]
    away = ((here[:, None] - here[None, matches.first]) ** 2).sum(axis=-1)
    weight = np.maximum(matches.cosine, 1e-3) * (np.exp(-away / (2 * NEAR**2)) + 1e-6)  # far from all: the mean of all
    found = here + (weight @ shift) / weight.sum(axis=1, keepdims=True)
    return np.asarray(found.reshape(*first, 2), np.float32)


# -- principal components --


@dataclass(frozen=True)
class Basis:
    """Directions in which features vary most, and the range of each that is drawn."""

    mean: Tensor  # D
    directions: Tensor  # 3×D, float64
    low: Floats
    high: Floats
    explained: Floats  # share of the variance of each

    def project(self, features: Tensor) -> Tensor:
        return (features.double() - self.mean) @ self.directions.T

    def colours(self, features: Tensor) -> Floats:
        """N×D -> N×3 in [0, 1]: red, green and blue are the three directions."""
        span = np.maximum(self.high - self.low, 1e-12)
        found = ((self.project(features).numpy() - self.low) / span).clip(0, 1)
        return np.asarray(found, np.float32)

    def aligned(self, features: Tensor, before: Floats) -> Basis:
        """The same directions in the order and with the signs that come nearest to colours these features had, N×3.

        Which of two directions that vary alike is the first, and which way it points, is chance from one basis to the
        next; the colours of one and the same image would jump with it.
        """
        drawn, wanted = self.project(features).numpy(), before.astype(np.float64)
        here, there = ((x - x.mean(axis=0)) / np.maximum(x.std(axis=0), 1e-12) for x in (drawn, wanted))
        likeness, places = here.T @ there, np.arange(len(self.directions))
        orders = [list(order) for order in permutations(range(len(places)))]
        order = max(orders, key=lambda order: float(np.abs(likeness[order, places]).sum()))
        signs = np.where(likeness[order, places] < 0, -1.0, 1.0)
        ends = np.sort(np.stack([self.low, self.high])[:, order] * signs, axis=0)
        directions = self.directions[order] * torch.from_numpy(signs)[:, None]
        return Basis(self.mean, directions, ends[0], ends[1], self.explained[order])


def basis(features: Tensor, count: int = 3) -> Basis:
    """Principal components of n×D features, whatever their order.

    A direction and its opposite are equally good: the one whose largest number is positive is taken. What lies
    outside the middle 98 % of the projections is drawn as the end of the range.
    """
    x = features.double()
    mean = x.mean(dim=0)
    variances, vectors = torch.linalg.eigh((x - mean).T @ (x - mean) / max(1, len(x) - 1))
    directions = vectors.flip(-1).T[:count]
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
    directions = directions * torch.where(largest < 0, -1.0, 1.0)
    low, high = np.percentile(((x - mean) @ directions.T).numpy(), (1, 99), axis=0)
    explained = variances.flip(-1)[:count].clamp(min=0) / variances.clamp(min=0).sum().clamp(min=1e-30)
    return Basis(mean, directions, low, high, explained.float().numpy())


def split(values: NDArray[np.float64]) -> float:
    """Otsu's threshold: what parts numbers into two groups that each vary least."""
    numbers = np.sort(values)
    below = np.arange(1, len(numbers))
    sums = np.cumsum(numbers)
    means = sums[:-1] / below, (sums[-1] - sums[:-1]) / (len(numbers) - below)
    between = below * (len(numbers) - below) * (means[0] - means[1]) ** 2
    if not len(between):
        return float(numbers[0])
    place = int(between.argmax())
    return float(numbers[place] + numbers[place + 1]) / 2


def foreground(features: Tensor, attention: Floats) -> NDArray[np.bool_]:
    """Which patches are things: the first direction is split in two, and things are what `[CLS]` looks at more."""
    first = basis(features, 1).project(features)[:, 0].numpy()
    upper = first > split(first)
    if upper.all() or not upper.any():
        return np.ones_like(upper)
    return upper if attention[upper].mean() >= attention[~upper].mean() else ~upper
