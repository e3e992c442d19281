"""Random resized crops as rectangles: numbers only, a pure function of the draws and of the sizes of the images."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from adclr.data.draws import Draws

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
TRIES = 10


def crop_boxes(
    draws: Draws, kind: str, count: int, sizes: Ints, scale: tuple[float, float], ratio: tuple[float, float]
) -> Ints:
    """Random resized crops, B×count×(top, left, height, width).

    Of ten tries (area uniform in `scale`, width over height log-uniform in `ratio`) the first that fits is taken; if
    none does, the largest central crop whose shape is in `ratio`.
    """
    height, width = sizes[:, :1], sizes[:, 1:]  # B×1

    def tried(places: Ints, images: Ints | None) -> tuple[Ints, Ints, Bools]:
        """Height, width and whether it fits, of tries at these places."""
        tall, wide = (height, width) if images is None else (height[images], width[images])
        area = tall * wide * draws.uniform_at(f"{kind} area", places, images, *scale)
        aspect = np.exp(draws.uniform_at(f"{kind} aspect", places, images, np.log(ratio[0]), np.log(ratio[1])))
        h, w = np.rint(np.sqrt(area / aspect)).astype(np.int64), np.rint(np.sqrt(area * aspect)).astype(np.int64)
        return h, w, (h > 0) & (w > 0) & (h <= tall) & (w <= wide)

    # nine in ten fit at once, so the other tries are drawn only where they are needed
    h, w, fits = tried(np.arange(count) * TRIES, None)
    image, crop = np.nonzero(~fits)
    again_h, again_w, again = tried(crop[:, None] * TRIES + np.arange(TRIES), image)
    first = again.argmax(axis=-1)[:, None]
    h[image, crop] = np.take_along_axis(again_h, first, -1)[:, 0]
    w[image, crop] = np.take_along_axis(again_w, first, -1)[:, 0]
    none_fits = np.zeros_like(fits)
    none_fits[image, crop] = np.logical_not(again.any(axis=-1))
    whole_h = np.minimum(height, np.maximum(1, np.rint(width / ratio[0]))).astype(np.int64)
    whole_w = np.minimum(width, np.maximum(1, np.rint(height * ratio[1]))).astype(np.int64)
    h, w = np.where(none_fits, whole_h, h), np.where(none_fits, whole_w, w)
    place = draws.uniform(f"{kind} place", count, 2)
    place = np.where(none_fits[..., None], 0.5, place)
    top = np.floor(place[..., 0] * (height - h + 1)).astype(np.int64)
    left = np.floor(place[..., 1] * (width - w + 1)).astype(np.int64)
    return np.stack([top, left, h, w], axis=-1)
