"""Which crops, jitters and masks an image gets: numbers only, a pure function of (seed, epoch, key, height, width)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from adclr.config.settings import Settings
from adclr.data.draws import TRIES, Draws, Words, crop_boxes

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
    jitter: Bools  # whether colours are jittered at all
    factors: Floats  # brightness, contrast, saturation: factors; hue: shift, of the colour circle
    order: Ints  # in which the four are applied
    grey: Bools
    sigma: Floats  # of the blur in pixels of the crop; 0 is none
    solarise: Bools


@dataclass(frozen=True)
class Plan:
    """What is made of a batch."""

    global_crops: Crops
    local_crops: Crops | None
    queries: Crops | None
    masks: Bools | None  # B×2×N, true where the student's patch is hidden
    room: int = 0  # hidden patches that a batch has room for on a GPU, see `room_for`


def plan(settings: Settings, epoch: int, keys: Words, sizes: Ints) -> Plan:
    """The plan of a batch of images with these keys and these sizes (B×2: height, width)."""
    views, patch = settings.views, settings.model.patch_size
    draws = Draws(settings.train.seed, epoch, keys)
    local = queries = masks = None
    room = 0
    global_crops = _crops(
        settings,
        draws,
        sizes,
        "global",
        2,
        views.global_size,
        views.global_scale,
        views.global_blur,
        views.solarize,
    )
    if views.num_local:
        local = _crops(
            settings,
            draws,
            sizes,
            "local",
            views.num_local,
            views.local_size,
            views.local_scale,
            views.local_blur,
        )
    if views.num_queries:
        photometric = views.query_photometric == "local"
        queries = _crops(
            settings,
            draws,
            sizes,
            "query",
            views.num_queries,
            patch,
            views.query_scale,
            views.local_blur if photometric else 0.0,
            photometric=photometric,
        )
        if settings.num_anchored:
            assert local is not None
            queries = _anchored(queries, local, settings.num_anchored)
    if settings.masked:
        side = views.global_size // patch
        masks = block_masks(draws, 2, (side, side), views.mask_probability, views.mask_ratio)
        if settings.method.target == "center":  # Sinkhorn's targets would see who fills the room
            room = room_for(2 * len(keys), side * side, views.mask_probability, views.mask_ratio)
    return Plan(global_crops, local, queries, masks, room)


def _crops(
    settings: Settings,
    draws: Draws,
    sizes: Ints,
    kind: str,
    count: int,
    size: int,
    scale: tuple[float, float],
    blur: float | tuple[float, float],
    solarise: float | tuple[float, float] = 0.0,
    photometric: bool = True,
) -> Crops:
    views = settings.views
    shape = len(sizes), count
    colours = photometric and settings.model.num_channels == 3  # they are changed in RGB only
    strengths = np.array([views.brightness, views.contrast, views.saturation, views.hue])
    factors, order = np.broadcast_to(NEUTRAL, (*shape, 4)), np.broadcast_to(np.arange(4), (*shape, 4))
    if colours and views.jitter:
        factors = NEUTRAL + strengths * draws.uniform(f"{kind} factors", count, 4, low=-1.0, high=1.0)
        order = draws.permutation(f"{kind} order", 4, count)
    sigma = np.zeros(shape)
    if np.any(blur):
        sigma = draws.uniform(f"{kind} sigma", count, low=views.blur_sigma[0], high=views.blur_sigma[1])

    def chance(what: str, probability: float | tuple[float, float], wanted: bool = True) -> Bools:
        # what cannot be is not drawn, which saves a third of the time of a plan
        if not wanted or not np.any(probability):
            return np.zeros(shape, np.bool_)
        return draws.chance(f"{kind} {what}", np.broadcast_to(np.asarray(probability, np.float64), shape), count)

    return Crops(
        size=size,
        boxes=crop_boxes(draws, kind, count, sizes, scale, views.aspect_ratio),
        flip=chance("flip", views.flip),
        jitter=chance("jitter", views.jitter, colours),
        factors=factors,
        order=order,
        grey=chance("grey", views.gray, colours),
        sigma=np.where(chance("blur", blur), sigma, 0.0),
        solarise=chance("solarise", solarise, colours),
    )


def _anchored(queries: Crops, local: Crops, count: int) -> Crops:
    """The queries, the first of them cut out where the first local crops are, and flipped as they are."""
    return replace(
        queries,
        boxes=np.concatenate([local.boxes[:, :count], queries.boxes[:, count:]], axis=1),
        flip=np.concatenate([local.flip[:, :count], queries.flip[:, count:]], axis=1),
    )


def room_for(num_views: int, patches: int, probability: float, ratio: tuple[float, float]) -> int:
    """How many patches so many views hide at most, but for 3 in 100 000 batches: the mean and four deviations.

    A batch that always has as many rows can be recorded as a CUDA graph; those that are not hidden weigh nothing.
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
    """Blockwise masks as iBOT draws them, B×count×N, all images at once.

    A masked view hides up to a share of its patches, uniform in `ratio`. Blocks are added while there is room: each of
    random area, at least (shorter side // 3)² patches unless less is left, and of random shape; ten tries for a
    block that adds something and not too much, and when all fail the mask is done.
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
        room = budget - mask.sum(axis=(1, 2))
        open_ = np.flatnonzero((room > 0) & (failures < TRIES))
        if not len(open_):
            return mask.reshape(batch, count, rows * columns)
        u = draws.uniform(f"mask block {attempt}", count, 4).reshape(views, 4)[open_]
        area = least + u[:, 0] * (room[open_] - least)
        shape = np.exp(np.log(aspect) * (1 - 2 * u[:, 1]))
        h = np.rint(np.sqrt(area * shape)).astype(np.int64)
        w = np.rint(np.sqrt(area / shape)).astype(np.int64)
        top = np.floor(u[:, 2] * (rows - h + 1)).astype(np.int64)[:, None, None]
        left = np.floor(u[:, 3] * (columns - w + 1)).astype(np.int64)[:, None, None]
        block = (y >= top) & (y < top + h[:, None, None]) & (x >= left) & (x < left + w[:, None, None])
        new = (block & ~mask[open_]).sum(axis=(1, 2))
        good = (h < rows) & (w < columns) & (new > 0) & (new <= room[open_])
        mask[open_[good]] |= block[good]
        failures[open_] = np.where(good, 0, failures[open_] + 1)
        attempt += 1
