"""The plan of a batch: its crops, color jitter and masks, numbers that depend on (seed, epoch, key, size) alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from adclr.config.settings import Settings
from adclr.data.random_draws import TRIES, Draws, Keys, crop_boxes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEUTRAL = np.array([1.0, 1.0, 1.0, 0.0])  # brightness, contrast, saturation: factors; hue: a shift


@dataclass(frozen=True)
class Crops:
    """V crops of each of B images, all resized to size×size; arrays are B×V or B×V×something."""

    size: int
    boxes: Ints  # top, left, height, width in pixels of the image
    flip: Bools
    jitter: Bools  # whether colors are jittered at all
    factors: Floats  # brightness, contrast, saturation: factors; hue: shift, of the color circle
    order: Ints  # in which the four are applied
    gray: Bools
    sigma: Floats  # of the blur in pixels of the crop; 0 is none
    solarize: Bools


@dataclass(frozen=True)
class BatchPlan:
    """The crops and masks of a batch."""

    global_crops: Crops
    local_crops: Crops | None
    queries: Crops | None
    masks: Bools | None  # B×2×N, true where the student's patch is hidden
    masked_rows: int = 0  # to which the hidden patches of a batch are padded on a GPU, see `num_masked_rows`


def plan_batch(settings: Settings, epoch: int, keys: Keys, sizes: Ints) -> BatchPlan:
    """Return the plan of a batch of images with these keys and sizes (B×2: height, width)."""
    views, patch = settings.views, settings.model.patch_size
    draws = Draws(settings.train.seed, epoch, keys)
    local = queries = masks = None
    masked_rows = 0
    crops = partial(_crops, settings, draws, sizes)
    global_crops = crops("global", 2, views.global_size, views.global_scale, views.global_blur, views.solarize)
    if views.num_local:
        local = crops("local", views.num_local, views.local_size, views.local_scale, views.local_blur)
    if views.num_queries:
        photometric = views.query_photometric == "local"
        blur = views.local_blur if photometric else 0.0
        queries = crops("query", views.num_queries, patch, views.query_scale, blur, photometric=photometric)
        if settings.num_anchored:
            assert local is not None
            queries = _anchored(queries, local, settings.num_anchored)
    if settings.masked:
        side = views.global_size // patch
        masks = block_masks(draws, 2, (side, side), views.mask_probability, views.mask_ratio)
        if settings.method.target == "center":  # Sinkhorn's targets would depend on the padding
            masked_rows = num_masked_rows(2 * len(keys), side * side, views.mask_probability, views.mask_ratio)
    return BatchPlan(global_crops, local, queries, masks, masked_rows)


def _crops(
    settings: Settings,
    draws: Draws,
    sizes: Ints,
    kind: str,
    count: int,
    size: int,
    scale: tuple[float, float],
    blur: float | tuple[float, float],
    solarize: float | tuple[float, float] = 0.0,
    photometric: bool = True,
) -> Crops:
    views = settings.views
    shape = len(sizes), count
    colors = photometric and settings.model.num_channels == 3  # they are changed in RGB only
    strengths = np.array([views.brightness, views.contrast, views.saturation, views.hue])
    factors, order = np.broadcast_to(NEUTRAL, (*shape, 4)), np.broadcast_to(np.arange(4), (*shape, 4))
    if colors and views.jitter:
        factors = NEUTRAL + strengths * draws.uniform(f"{kind} factors", count, 4, low=-1.0, high=1.0)
        order = draws.permutation(f"{kind} order", 4, count)
    sigma = np.zeros(shape)
    if np.any(blur):
        sigma = draws.uniform(f"{kind} sigma", count, low=views.blur_sigma[0], high=views.blur_sigma[1])

    def chance(word: str, probability: float | tuple[float, float], possible: bool = True) -> Bools:
        # what is impossible is not drawn, which saves a third of the time of a plan
        if not possible or not np.any(probability):
            return np.zeros(shape, np.bool_)
        return draws.chance(f"{kind} {word}", np.broadcast_to(np.asarray(probability, np.float64), shape), count)

    # the words of draws are part of their results, so "grey" and "solarise" must not be respelled
    return Crops(
        size=size,
        boxes=crop_boxes(draws, kind, count, sizes, scale, views.aspect_ratio),
        flip=chance("flip", views.flip),
        jitter=chance("jitter", views.jitter, colors),
        factors=factors,
        order=order,
        gray=chance("grey", views.gray, colors),
        sigma=np.where(chance("blur", blur), sigma, 0.0),
        solarize=chance("solarise", solarize, colors),
    )


def _anchored(queries: Crops, local: Crops, count: int) -> Crops:
    """Return the queries, the first of them with the boxes and flips of the first local crops."""
    return replace(
        queries,
        boxes=np.concatenate([local.boxes[:, :count], queries.boxes[:, count:]], axis=1),
        flip=np.concatenate([local.flip[:, :count], queries.flip[:, count:]], axis=1),
    )


def num_masked_rows(num_views: int, patches: int, probability: float, ratio: tuple[float, float]) -> int:
    """Return how many patches so many views hide at most, except in 3 of 100 000 batches: mean plus four deviations.

    A batch with a fixed number of rows can be recorded as a CUDA graph; rows of visible patches have weight 0.
    """
    low, high = ratio
    mean, square = probability * (low + high) / 2, probability * (low * low + low * high + high * high) / 3
    most = num_views * mean + 4 * math.sqrt(num_views * (square - mean * mean))
    return math.ceil(patches * min(most, num_views * high))


def block_masks(
    draws: Draws,
    count: int,
    grid: tuple[int, int],
    probability: float,
    ratio: tuple[float, float],
    aspect: float = 0.3,
) -> Bools:
    """Return blockwise masks as iBOT draws them, B×count×N, all images at once.

    A masked view hides up to a share of its patches, uniform in `ratio`. Blocks are added while patches of this budget
    remain: each of random area, at least (shorter side // 3)² patches unless fewer remain, and of random shape. A block
    must hide new patches and not too many; after ten failed tries in a row the mask is complete.
    """
    batch, (rows, columns) = len(draws.state), grid
    views = batch * count
    budget = draws.uniform("mask ratio", count, low=ratio[0], high=ratio[1]) * rows * columns
    budget = np.where(draws.chance("masked", probability, count), budget, 0.0).reshape(views)
    least = (min(rows, columns) // 3) ** 2
    mask = np.zeros((views, rows, columns), np.bool_)
    y, x = np.arange(rows)[None, :, None], np.arange(columns)[None, None, :]
    failures = np.zeros(views, np.int64)
    attempt = 0
    while True:
        remaining = budget - mask.sum(axis=(1, 2))
        active = np.flatnonzero((remaining > 0) & (failures < TRIES))
        if not len(active):
            return mask.reshape(batch, count, rows * columns)
        u = draws.uniform(f"mask block {attempt}", count, 4).reshape(views, 4)[active]
        area = least + u[:, 0] * (remaining[active] - least)
        shape = np.exp(np.log(aspect) * (1 - 2 * u[:, 1]))
        h = np.rint(np.sqrt(area * shape)).astype(np.int64)
        w = np.rint(np.sqrt(area / shape)).astype(np.int64)
        top = np.floor(u[:, 2] * (rows - h + 1)).astype(np.int64)[:, None, None]
        left = np.floor(u[:, 3] * (columns - w + 1)).astype(np.int64)[:, None, None]
        block = (y >= top) & (y < top + h[:, None, None]) & (x >= left) & (x < left + w[:, None, None])
        new = (block & ~mask[active]).sum(axis=(1, 2))
        good = (h < rows) & (w < columns) & (new > 0) & (new <= remaining[active])
        mask[active[good]] |= block[good]
        failures[active] = np.where(good, 0, failures[active] + 1)
        attempt += 1
