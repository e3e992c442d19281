"""Random numbers as functions of a key, never of the state of a generator.

An image's key is a 64-bit hash of its relative path. `Draws(seed, epoch, keys).uniform("flip", 12)` returns twelve
numbers for each image that depend on seed, epoch, key, the word and the position alone: not on the batch, the process,
the worker, earlier draws or other images. A word is part of the result: another spelling draws other numbers.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
TRIES = 10  # to draw a crop that fits
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST = np.uint64(31)


def key_of(text: str) -> int:
    """Return 64 bits of a path or a word, the same on every machine."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def mix(x: Keys) -> Keys:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood 2014): every input bit changes every output bit."""
    for shift, factor in _ROUNDS:
        x = x ^ (x >> shift)
        x *= factor
    return x ^ (x >> _LAST)


def combine(*numbers: int) -> int:
    """Return a 64-bit number that depends on each of these numbers and on their order."""
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = mix(state + _GOLDEN + mix(np.array([number % 2**64], np.uint64)))
    return int(state[0])


@cache
def _word(text: str) -> np.uint64:
    return np.uint64(key_of(text))


def _to_uniform(bits: Keys, low: float, high: float) -> NDArray[np.float64]:
    """Map 64 bits to a number in [low, high) by the upper 53."""
    return low + (high - low) * ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


class Draws:
    """Random numbers of a batch of images in an epoch."""

    def __init__(self, seed: int, epoch: int, keys: Keys) -> None:
        self.state = mix(keys + np.uint64(combine(seed, epoch)))

    def bits(self, word: str, *shape: int) -> Keys:
        """Return len(keys)×shape words of 64 random bits."""
        positions = np.arange(int(np.prod(shape, dtype=np.int64)))
        return self._at(word, positions).reshape(len(self.state), *shape)

    def _at(self, word: str, positions: NDArray[np.int64], images: NDArray[np.int64] | None = None) -> Keys:
        """Return the bits at some positions of all images, or, of each of these images, at its row of positions."""
        start = mix((self.state if images is None else self.state[images]) ^ _word(word))
        return mix(start[:, None] + (positions + 1).astype(np.uint64) * _GOLDEN)

    def uniform_at(
        self, word: str, positions: NDArray[np.int64], images: NDArray[np.int64] | None, low: float, high: float
    ) -> NDArray[np.float64]:
        """Return some of the numbers of `uniform`, without computing the others."""
        return _to_uniform(self._at(word, positions, images), low, high)

    def uniform(self, word: str, *shape: int, low: float = 0.0, high: float = 1.0) -> NDArray[np.float64]:
        """Return numbers in [low, high) of 53 random bits each."""
        return _to_uniform(self.bits(word, *shape), low, high)

    def chance(self, word: str, probability: float | NDArray[np.float64], *shape: int) -> NDArray[np.bool_]:
        """Return true with a probability."""
        return np.asarray(self.uniform(word, *shape) < probability)

    def permutation(self, word: str, length: int, *shape: int) -> NDArray[np.int64]:
        """Return len(keys)×shape×length permutations of 0..length-1."""
        return np.argsort(self.bits(word, *shape, length), axis=-1, kind="stable")


def epoch_order(seed: int, epoch: int, keys: Keys) -> NDArray[np.int64]:
    """Return the order of images in an epoch: by a hash of each, so that adding or removing a file moves no other."""
    return np.argsort(Draws(seed, epoch, keys).bits("order", 1)[:, 0], kind="stable")


def crop_boxes(
    draws: Draws, kind: str, count: int, sizes: Ints, scale: tuple[float, float], ratio: tuple[float, float]
) -> Ints:
    """Return random resized crops, B×count×(top, left, height, width).

    Of ten tries (area uniform in `scale`, width over height log-uniform in `ratio`) the first that fits is used; if
    none fits, the largest central crop whose aspect ratio is in `ratio`.
    """
    height, width = sizes[:, :1], sizes[:, 1:]  # B×1

    def draw_size(positions: Ints, images: Ints | None) -> tuple[Ints, Ints, Bools]:
        """Return height, width and whether it fits, of the tries at these positions."""
        tall, wide = (height, width) if images is None else (height[images], width[images])
        area = tall * wide * draws.uniform_at(f"{kind} area", positions, images, *scale)
        aspect = np.exp(draws.uniform_at(f"{kind} aspect", positions, images, np.log(ratio[0]), np.log(ratio[1])))
        h, w = np.rint(np.sqrt(area / aspect)).astype(np.int64), np.rint(np.sqrt(area * aspect)).astype(np.int64)
        return h, w, (h > 0) & (w > 0) & (h <= tall) & (w <= wide)

    # nine in ten first tries fit, so the other tries are drawn only where they are needed
    h, w, fits = draw_size(np.arange(count) * TRIES, None)
    image, crop = np.nonzero(~fits)
    again_h, again_w, again = draw_size(crop[:, None] * TRIES + np.arange(TRIES), image)
    first = again.argmax(axis=-1)[:, None]
    h[image, crop] = np.take_along_axis(again_h, first, -1)[:, 0]
    w[image, crop] = np.take_along_axis(again_w, first, -1)[:, 0]
    none_fits = np.zeros_like(fits)
    none_fits[image, crop] = np.logical_not(again.any(axis=-1))
    whole_h = np.minimum(height, np.maximum(1, np.rint(width / ratio[0]))).astype(np.int64)
    whole_w = np.minimum(width, np.maximum(1, np.rint(height * ratio[1]))).astype(np.int64)
    h, w = np.where(none_fits, whole_h, h), np.where(none_fits, whole_w, w)
    corner = draws.uniform(f"{kind} place", count, 2)
    corner = np.where(none_fits[..., None], 0.5, corner)
    top = np.floor(corner[..., 0] * (height - h + 1)).astype(np.int64)
    left = np.floor(corner[..., 1] * (width - w + 1)).astype(np.int64)
    return np.stack([top, left, h, w], axis=-1)
