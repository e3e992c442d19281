"""Random numbers as functions of a key, never of "the state of a generator so far".

An image's key is a 64-bit hash of its relative path. `Draws(seed, epoch, keys).uniform("flip", 12)` gives each image
twelve numbers that depend on seed, epoch, key, the word and the place alone: not on the batch, the process, the
worker, on what was drawn before, or on other images.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST = np.uint64(31)


def key_of(text: str) -> int:
    """64 bits of a path or a word, the same on every machine."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def mix(x: Words) -> Words:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every bit in moves every bit out."""
    for shift, factor in _ROUNDS:
        x = x ^ (x >> shift)
        x *= factor
    return x ^ (x >> _LAST)


def combine(*numbers: int) -> int:
    """One 64-bit number that depends on each of some numbers and on their order."""
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = mix(state + _GOLDEN + mix(np.array([number % 2**64], np.uint64)))
    return int(state[0])


@cache
def _word(text: str) -> np.uint64:
    return np.uint64(key_of(text))


def _spread(bits: Words, low: float, high: float) -> NDArray[np.float64]:
    return low + (high - low) * ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


class Draws:
    def __init__(self, seed: int, epoch: int, keys: Words) -> None:
        self.state = mix(keys + np.uint64(combine(seed, epoch)))

    def bits(self, word: str, *shape: int) -> Words:
        """len(keys)×shape words of 64 random bits."""
        places = np.arange(int(np.prod(shape, dtype=np.int64)))
        return self._at(word, places).reshape(len(self.state), *shape)

    def _at(self, word: str, places: NDArray[np.int64], images: NDArray[np.int64] | None = None) -> Words:
        """The words at some places, the same for all images, or of some images, each with a row of places."""
        start = mix((self.state if images is None else self.state[images]) ^ _word(word))
        return mix(start[:, None] + (places + 1).astype(np.uint64) * _GOLDEN)

    def uniform_at(
        self, word: str, places: NDArray[np.int64], images: NDArray[np.int64] | None, low: float, high: float
    ) -> NDArray[np.float64]:
        """Some of the numbers that `uniform` gives, without the others."""
        return _spread(self._at(word, places, images), low, high)

    def uniform(self, word: str, *shape: int, low: float = 0.0, high: float = 1.0) -> NDArray[np.float64]:
        """Numbers in [low, high): 53 random bits each."""
        return _spread(self.bits(word, *shape), low, high)

    def chance(self, word: str, probability: float | NDArray[np.float64], *shape: int) -> NDArray[np.bool_]:
        """True with the given probability."""
        return np.asarray(self.uniform(word, *shape) < probability)

    def permutation(self, word: str, length: int, *shape: int) -> NDArray[np.int64]:
        """len(keys)×shape×length orders of 0..length-1."""
        return np.argsort(self.bits(word, *shape, length), axis=-1, kind="stable")


def epoch_order(seed: int, epoch: int, keys: Words) -> NDArray[np.int64]:
    """The order in which an epoch visits images: by a hash of each, so that a file more or less moves no other."""
    return np.argsort(Draws(seed, epoch, keys).bits("order", 1)[:, 0], kind="stable")


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
