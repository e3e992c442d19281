"""Does it learn, without labels: how often an image is found again in another view, and a patch its place in it.

Each image is cut twice, at other places and sizes; the second view has another brightness and is flipped for half of
the images. `image_matching`: the `[CLS]` of a first view, of all second views, is nearest to that of its own image.
`patch_matching`: a patch of the first view whose place lies in the second is matched by the cosine of its features to
the patches there, and is right if the best of them is at most one patch off. An untrained network of the same shape
says what shape and pixels alone give, `*_chance` what guessing gives. `rank_*` is the number of directions in which the
features of images differ. All in percent but the ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from adclr.config.sections import Count, Device, Section, UserError
from adclr.data.collection import open_source
from adclr.data.draws import Draws
from adclr.data.sources import Source, Subset
from adclr.features.reader import ImageReader, center_crop, normalizer, split_batches
from adclr.model.vit import VisionTransformer
from adclr.system.devices import choose
from adclr.system.progress import track
from adclr.weights.backbone import Weights, load_weights

WHOLE = 1.5  # side of the image that is cut, of the input size
SIDES = (0.6, 1.0)  # of a view, of the image's
BRIGHTNESS = 0.2  # the second view's: a factor in 1 +- this
NEAR = 1.0  # patches
ROWS = 4096  # images that are compared with all others at once
SCORES = ("image_matching", "patch_matching", "rank_cls", "rank_patches")
DEVIATIONS = 3.0  # by which a share of images must have risen before it counts


class Settings(Section):
    weights: str = Field("", description="a run directory, a file or folder of weights, or timm:NAME")
    partial: bool = Field(False, description="take weights that do not cover the whole backbone")
    data: str = Field("", description="images that were not trained on: folder, .txt list, .tar shards or hf:PATH")
    max_images: Count = Field(1000, description="images that are looked at, the first by their keys")
    batch_size: Count = Field(64, description="images at once")
    num_workers: int | None = Field(None, ge=1, description="decoding threads; null: one for each CPU core")
    device: Device = Field("auto", description="auto: the GPU if there is one")


class Boxes(NamedTuple):
    """Where a view lies in each image: left, top and side of 1, B each; and which are flipped."""

    left: Tensor
    top: Tensor
    side: Tensor
    flipped: Tensor

    def place(self, across: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """From places in the view (...) to places in the images (B×...)."""
        x = torch.where(self.flipped, 1 - across.unsqueeze(-1), across.unsqueeze(-1)) * self.side + self.left
        y = down.unsqueeze(-1) * self.side + self.top
        return x.movedim(-1, 0), y.movedim(-1, 0)

    def find(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The other way round: B×n places in the images to B×n places in the view."""
        across = (x - self.left.unsqueeze(1)) / self.side.unsqueeze(1)
        down = (y - self.top.unsqueeze(1)) / self.side.unsqueeze(1)
        return torch.where(self.flipped.unsqueeze(1), 1 - across, across), down


def run(settings: Settings, place: Path | None = None) -> dict[str, float]:  # noqa: ARG001
    if not settings.weights or not settings.data:
        raise UserError("matching needs both weights and images; give --weights and --data")
    source, device = open_source(settings.data), choose(settings.device)
    weights = load_weights(settings.weights, settings.partial)
    weights.vit.to(device)
    found = score(weights, source, settings, device)
    before = score(replace(weights, vit=untrained(weights.vit)), source, settings, device)
    return found | {f"{name}_untrained": before[name] for name in SCORES}


def has_learned(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    """Whether images or patches are found again clearly more often than by the untrained network.

    Patches of one image are taken for one case. The demo's network, whose kNN rises by 20 points, finds 33.6 % of 500
    images again, 15.8 % untrained, and 46.5 % of patches, 47.0 % untrained.
    """

    def rose(name: str) -> bool:
        shares = before[name] / 100, after[name] / 100
        noise = sum(share * (1 - share) for share in shares) / after["num_images"]
        return shares[1] - shares[0] > DEVIATIONS * math.sqrt(noise)

    return rose("image_matching") or rose("patch_matching")


def untrained(vit: VisionTransformer) -> VisionTransformer:
    """One of the same shape with new weights, always the same ones."""
    other = copy.deepcopy(vit).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for module in other.modules():
            if isinstance(module, nn.Conv2d | nn.LayerNorm):
                module.reset_parameters()
        other.initialise()
    return other.to(next(vit.parameters()).device)


@torch.no_grad()
def score(
    weights: Weights, source: Source, settings: Settings, device: torch.device, show: bool = True
) -> dict[str, float]:
    """The scores, and what they are to be compared with."""
    vit = weights.vit
    chosen: Source = Subset(source, np.argsort(source.keys, kind="stable")[: settings.max_images])
    size = tuple(round(WHOLE * side) for side in vit.input_size)
    reader = ImageReader(chosen, weights.decoder, center_crop((size[0], size[1])), device, settings.num_workers)
    normalize, order = normalizer(weights, device), split_batches(np.arange(len(chosen)), settings.batch_size)
    right = chance = count = 0.0
    cls: list[Tensor] = []
    others: list[Tensor] = []
    patches: list[Tensor] = []
    for batch in track(reader.batches(order), "matching", len(order), show):
        if not batch.groups:
            continue
        (group,) = batch.groups  # all crops are of one size
        keys, images = chosen.keys[group.indices], group.pixels.float() / 255
        one, other = draw(Draws(0, 0, keys), device)
        factor = torch.from_numpy(1 + Draws(0, 0, keys).uniform("light", 1, low=-BRIGHTNESS, high=BRIGHTNESS))
        first = cut(images, one, vit.input_size)
        second = cut(images, other, vit.input_size) * factor.to(first).view(-1, 1, 1, 1)
        a, b = (vit(normalize(view.clamp(0, 1))) for view in (first, second))
        found = match(a.patches.float(), b.patches.float(), one, other, vit.grid)
        right, chance, count = right + found[0], chance + found[1], count + found[2]
        cls.append(a.cls.float())
        others.append(b.cls.float())
        patches.append(a.patches[:, :: max(1, a.patches.shape[1] // 8)].flatten(0, 1).float())
    if not count:
        raise UserError(f"none of the {len(chosen)} images of {source.root} can be read; name others")
    images_found, num_images = found_again(torch.cat(cls), torch.cat(others)), sum(len(part) for part in cls)
    return {
        "image_matching": 100 * images_found / num_images,
        "image_matching_chance": 100 / num_images,
        "patch_matching": 100 * right / count,
        "patch_matching_chance": 100 * chance / count,
        "rank_cls": spread(torch.cat(cls))[1].item(),
        "rank_patches": spread(torch.cat(patches))[1].item(),
        "num_images": float(num_images),
    }


def found_again(first: Tensor, second: Tensor) -> int:
    """How many rows of `first` are nearest, by cosine, to the row of `second` of their own number; n×D each.

    Of several that are as near, as in a network that says the same of all images, only the first counts.
    """
    one, other = F.normalize(first, dim=-1), F.normalize(second, dim=-1)
    right = 0
    for start in range(0, len(one), ROWS):
        best = (one[start : start + ROWS] @ other.mT).argmax(dim=-1)
        right += int((best == torch.arange(start, start + len(best), device=best.device)).sum())
    return right


def draw(draws: Draws, device: torch.device) -> tuple[Boxes, Boxes]:
    """Two views of each image."""

    def boxes(name: str) -> Boxes:
        side = draws.uniform(f"{name} side", 1, low=SIDES[0], high=SIDES[1])[:, 0]
        left, top = (draws.uniform(f"{name} {word}", 1)[:, 0] * (1 - side) for word in ("left", "top"))
        flipped = draws.chance(f"{name} flip", 0.5 if name == "second" else 0.0, 1)[:, 0]
        where = torch.from_numpy(np.stack([left, top, side])).float().to(device)
        return Boxes(where[0], where[1], where[2], torch.from_numpy(flipped).to(device))

    return boxes("first"), boxes("second")


def cut(images: Tensor, boxes: Boxes, size: tuple[int, int]) -> Tensor:
    """B×C×H×W -> B×C×size"""
    down, across = _middles(size, images.device)
    x, y = boxes.place(across, down)
    return F.grid_sample(
        images, 2 * torch.stack([x, y], dim=-1) - 1, mode="bicubic", padding_mode="border", align_corners=False
    )


def match(first: Tensor, second: Tensor, one: Boxes, other: Boxes, grid: tuple[int, int]) -> tuple[float, float, float]:
    """How many patches find their place, how many would by chance, and of how many; features B×N×D."""
    height, width = grid
    down, across = _middles(grid, first.device)
    x, y = one.place(across.flatten(), down.flatten())
    across, down = other.find(x, y)  # B×N, of the view
    inside = (across >= 0) & (across < 1) & (down >= 0) & (down < 1)
    best = (F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).mT).argmax(dim=-1)
    column, row = across * width - 0.5, down * height - 0.5  # in patches

    def near(columns: Tensor, rows: Tensor) -> Tensor:
        return ((columns - column).abs() <= NEAR) & ((rows - row).abs() <= NEAR)

    right = near(best % width, best // width) & inside
    all_of_them = torch.arange(height * width, device=first.device)
    hits = sum((near(place % width, place // width) & inside).sum() for place in all_of_them)
    assert isinstance(hits, Tensor)
    return right.sum().item(), hits.item() / (height * width), inside.sum().item()


def _middles(size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """(down, across): the middles of rows and columns, height×width each, of 1."""
    sides = ((torch.arange(n, device=device) + 0.5) / n for n in size)
    down, across = torch.meshgrid(*sides, indexing="ij")
    return down, across


def spread(features: Tensor) -> tuple[Tensor, Tensor]:
    """n×D: the deviation of features of length 1 from image to image (1: in all directions), and their effective rank.

    The rank is exp of the entropy of the covariance's eigenvalues as shares: D if all directions are used alike.
    """
    unit = F.normalize(features, dim=-1)
    centered = unit - unit.mean(dim=0)
    deviation = centered.square().sum(dim=-1).mean().sqrt()
    small = centered.T @ centered if centered.shape[0] > centered.shape[1] else centered @ centered.T
    values = torch.linalg.eigvalsh(small).clamp(min=0)
    shares = values / values.sum().clamp(min=1e-30)
    return deviation, torch.special.entr(shares).sum().exp()
