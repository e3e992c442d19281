"""Attention maps, similar patches and principal components of a backbone, as numbers; `pictures` draws them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from adclr.config.parsing import UserError
from adclr.data.decode import Pixels
from adclr.data.random_draws import Draws, crop_boxes
from adclr.features.reader import normalizer
from adclr.model.named_tensors import Memory
from adclr.model.vit import VisionTransformer
from adclr.system.devices import send
from adclr.weights.backbone import Weights, load_weights

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Box = tuple[float, float, float, float]  # left, top, right, bottom as shares of the width and the height
Grid = tuple[int, int]  # patches down and across
MAX_ASPECT = 4  # longer over shorter side; a longer image is shrunk further, so that its patches stay few
FLOW_SIGMA = 0.08  # of the width and height: how far a match says where its neighbors are
CHUNK = 1024  # patches compared with all others at once


def load(name: str, device: torch.device) -> Weights:
    """Return weights whose images can be read before the queries, on the device."""
    weights = load_weights(name, partial=None)
    if weights.vit.query_keys == "all":
        raise UserError(f"{name} has model.query_keys=all, so that nothing can be read before its queries; use others")
    weights.vit.to(device)
    return weights


def short_name(weights: str) -> str:
    """Return the name of weights in pictures: the last part of their path that tells one run from another."""
    path = Path(weights)
    for last in ("backbone.safetensors", "run"):
        path = path.parent if path.name == last and path.parent.name else path
    return path.name


class InputImage(NamedTuple):
    """An image resized to whole patches, as the network gets it."""

    name: str
    pixels: Pixels  # C×height×width
    label: str | None = None

    def grid(self, vit: VisionTransformer) -> Grid:
        """Return the patches down and across."""
        return vit.grid_of(*self.pixels.shape[1:])

    def crop(self, box: Box, side: int) -> Pixels:
        """Return the query crop of a box, C×side×side."""
        height, width = self.pixels.shape[1:]
        edges = box[0] * width, box[1] * height, box[2] * width, box[3] * height
        return _resize(self.pixels, side, side, edges)


def prepare_image(name: str, pixels: Pixels, size: int, patch: int, label: str | None = None) -> InputImage:
    """Return an image with its shorter side of about `size` pixels and both sides of whole patches."""
    height, width = pixels.shape[1:]
    scale = min(size / min(height, width), MAX_ASPECT * size / max(height, width))
    rows, columns = (max(1, round(side * scale / patch)) * patch for side in (height, width))
    return InputImage(name, pixels if (rows, columns) == (height, width) else _resize(pixels, rows, columns), label)


def _resize(pixels: Pixels, height: int, width: int, box: Box | None = None) -> Pixels:
    bicubic = Image.Resampling.BICUBIC
    channels = (Image.fromarray(channel).resize((width, height), bicubic, box) for channel in pixels)
    return np.stack([np.asarray(channel) for channel in channels])


def draw_boxes(
    image: InputImage, key: int, count: int, scale: tuple[float, float] = (0.05, 0.15), seed: int = 0
) -> list[Box]:
    """Return query boxes drawn as in training by key and seed; `scale` is the range of their area, of the image's."""
    height, width = image.pixels.shape[1:]
    draws = Draws(seed, 0, np.array([key], np.uint64))
    (boxes,) = crop_boxes(draws, "query", count, np.array([[height, width]]), scale, (3 / 4, 4 / 3))
    return [(x / width, y / height, (x + w) / width, (y + h) / height) for y, x, h, w in boxes.tolist()]


def network_input(weights: Weights, pixels: Pixels) -> Tensor:
    """Return normalized images of uint8 pixels, ...×C×height×width, on the device of the network."""
    device = weights.vit.cls_token.device
    return normalizer(weights, device)(send(pixels, device))


@torch.no_grad()
def read_memory(weights: Weights, image: InputImage) -> Memory:
    """Return what queries of an image attend to."""
    return weights.vit.read(network_input(weights, image.pixels[None]))


@torch.no_grad()
def patch_features(weights: Weights, image: InputImage, block: int = -1) -> Tensor:
    """Return the patch features after a block and the last norm, N×D float32 on the CPU."""
    (tokens,) = weights.vit.intermediate(network_input(weights, image.pixels[None]), [block])
    return tokens.patches[0].float().cpu()


# -- attention --


@torch.no_grad()
def attend(
    weights: Weights, image: InputImage, memory: Memory, crops: Pixels | None = None, block: int = -1
) -> tuple[Floats, Tensor]:
    """Return the attention maps, (1+H)×Q×rows×columns, and the answers, Q×D, of query crops or of `[CLS]`.

    The first map is the mean of the heads, the others are those of each.
    """
    queries = None if crops is None else network_input(weights, crops).unsqueeze(0)
    attention, answers = weights.vit.gaze(memory, queries, block)
    maps = patch_attention(attention, weights.vit.num_prefix, image.grid(weights.vit))
    return maps[0].cpu().numpy(), answers[0].float().cpu()


def patch_attention(attention: Tensor, num_prefix: int, grid: Grid) -> Tensor:
    """Return the attention to patches, B×H×Q×T -> B×(1+H)×Q×rows×columns, the mean of the heads first.

    Each map has the mean 1: a number says how many times as much a patch gets as under uniform attention.
    """
    patches = attention[..., num_prefix : num_prefix + grid[0] * grid[1]]
    maps = torch.cat([patches.mean(dim=1, keepdim=True), patches], dim=1)
    scaled = maps / maps.mean(dim=-1, keepdim=True).clamp(min=1e-20)
    return scaled.view(*scaled.shape[:-1], *grid)


def top_mass(values: Floats, share: float) -> NDArray[np.bool_]:
    """Return a mask of the fewest patches that together hold a share of the map, as DINO shows attention."""
    flat = values.ravel()
    order = np.argsort(-flat, kind="stable")
    before = np.cumsum(flat[order], dtype=np.float64) - flat[order]
    mask = np.zeros(flat.size, np.bool_)
    mask[order] = before < share * flat.sum(dtype=np.float64)
    return mask.reshape(values.shape)


def enlarge(values: Floats, height: int, width: int) -> Floats:
    """Return a map of patches as one of pixels, bicubic; the middle of a patch stays where it is in the image."""
    pixels = Image.fromarray(values.astype(np.float32)).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(pixels, np.float32).clip(values.min(), values.max())


# -- similarity --


def similarity(feature: Tensor, features: Tensor) -> Tensor:
    """Return the cosines of ...×D and N×D features, ...×N."""
    return F.normalize(feature, dim=-1) @ F.normalize(features, dim=-1).T


class Matches(NamedTuple):
    """Pairs of patches, each the other's nearest neighbor, the most similar first."""

    first: Ints  # index in the grid of the first image, row by row
    second: Ints
    cosine: Floats


def mutual_neighbors(first: Tensor, second: Tensor) -> Matches:
    """Return the mutual nearest neighbors by cosine of N×D and M×D features; at most CHUNK×M numbers at once."""
    forward, cosine = _nearest(first, second)
    backward, _ = _nearest(second, first)
    indices = torch.arange(len(first))
    mutual = backward[forward] == indices
    order = cosine[mutual].argsort(descending=True, stable=True)
    return Matches(indices[mutual][order].numpy(), forward[mutual][order].numpy(), cosine[mutual][order].numpy())


def _nearest(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of the second each of the first is nearest to, and their cosine."""
    parts = [similarity(part, second).max(dim=1) for part in torch.split(first, CHUNK)]
    return torch.cat([best.indices for best in parts]), torch.cat([best.values for best in parts])


def patch_centers(grid: Grid) -> Floats:
    """Return N×2: (x, y) of the center of each patch as shares of the width and the height."""
    y, x = np.meshgrid(*((np.arange(n) + 0.5) / n for n in grid), indexing="ij")
    return np.stack([x, y], axis=-1).reshape(-1, 2).astype(np.float32)


def flow(matches: Matches, first: Grid, second: Grid) -> Floats:
    """Return rows×columns×2: for each patch of the first image, its position in the second.

    The shift of each patch is the mean of those of the matches, weighted by their cosine and by their distance in the
    first image (a Gaussian of 8 % of its sides), so that one false match among right ones does little.
    """
    centers = patch_centers(first)
    shift = patch_centers(second)[matches.second] - centers[matches.first]
    distance = ((centers[:, None] - centers[None, matches.first]) ** 2).sum(axis=-1)  # squared
    nearness = np.exp(-distance / (2 * FLOW_SIGMA**2)) + 1e-6  # far from all matches, the mean of all counts
    weight = np.maximum(matches.cosine, 1e-3) * nearness
    positions = centers + (weight @ shift) / weight.sum(axis=1, keepdims=True)
    return np.asarray(positions.reshape(*first, 2), np.float32)


# -- principal components --


@dataclass(frozen=True)
class Basis:
    """The directions in which features vary most, and the range of each that is drawn."""

    mean: Tensor  # D
    directions: Tensor  # 3×D, float64
    low: Floats
    high: Floats
    explained: Floats  # share of the variance of each

    def project(self, features: Tensor) -> Tensor:
        """Return the components of features, N×D -> N×3."""
        return (features.double() - self.mean) @ self.directions.T

    def colors(self, features: Tensor) -> Floats:
        """Return N×3 colors in [0, 1] of N×D features: red, green and blue are the three directions."""
        span = np.maximum(self.high - self.low, 1e-12)
        return np.asarray(((self.project(features).numpy() - self.low) / span).clip(0, 1), np.float32)

    def aligned(self, features: Tensor, before: Floats) -> Basis:
        """Return the same directions in the order and with the signs nearest to earlier colors of these features, N×3.

        Which of two directions of equal variance is the first, and which way it points, is chance from one basis to the
        next; the colors of one and the same image would jump with it.
        """
        values = self.project(features).numpy(), before.astype(np.float64)
        now, earlier = ((x - x.mean(axis=0)) / np.maximum(x.std(axis=0), 1e-12) for x in values)
        correlation, columns = now.T @ earlier, np.arange(len(self.directions))
        orders = [list(order) for order in permutations(range(len(columns)))]
        order = max(orders, key=lambda order: float(np.abs(correlation[order, columns]).sum()))
        signs = np.where(correlation[order, columns] < 0, -1.0, 1.0)
        ends = np.sort(np.stack([self.low, self.high])[:, order] * signs, axis=0)
        directions = self.directions[order] * torch.from_numpy(signs)[:, None]
        return Basis(self.mean, directions, ends[0], ends[1], self.explained[order])


def fit_basis(features: Tensor, count: int = 3) -> Basis:
    """Return the principal components of n×D features, independent of their order.

    A direction and its opposite are equally good: the one whose largest number is positive is taken. Projections
    outside the middle 98 % are drawn as the end of the range.
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


def otsu_threshold(values: NDArray[np.float64]) -> float:
    """Return Otsu's threshold, which splits numbers into two groups that each vary least."""
    numbers = np.sort(values)
    below = np.arange(1, len(numbers))
    sums = np.cumsum(numbers)
    means = sums[:-1] / below, (sums[-1] - sums[:-1]) / (len(numbers) - below)
    between = below * (len(numbers) - below) * (means[0] - means[1]) ** 2
    if not len(between):
        return float(numbers[0])
    best = int(between.argmax())
    return float(numbers[best] + numbers[best + 1]) / 2


def foreground(features: Tensor, attention: Floats) -> NDArray[np.bool_]:
    """Return a mask of foreground patches: of the two sides of the first direction, the one `[CLS]` attends to more."""
    first = fit_basis(features, 1).project(features)[:, 0].numpy()
    upper = first > otsu_threshold(first)
    if upper.all() or not upper.any():
        return np.ones_like(upper)
    return upper if attention[upper].mean() >= attention[~upper].mean() else ~upper
