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
