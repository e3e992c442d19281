"""Images in the order of a number that each key gives, computed a piece at a time.

The order of an epoch of 100 million images would be 800 MB in every process, and sorting it takes several times that.
Here one pass over the keys counts the numbers by their upper 16 bits; a piece of the order is then sorted out of the
images whose numbers lie between two bounds, in one more pass. The result is that of one sort to the last position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from adclr.data.random_draws import Draws, Keys

PIECE = 2**22  # images that are sorted at once: about 200 MB while they are, 32 MB afterwards
SCAN = 2**17  # keys of which the numbers are computed at once, so that they stay in the processor's cache
SHIFT = np.uint64(48)  # leaves the upper 16 bits


class Piece(NamedTuple):
    """A part of an order: positions `start` to `end` - 1, of the images whose numbers are `low` to `low + span`."""

    start: int
    end: int
    low: np.uint64
    span: np.uint64


class KeyOrder:
    """The indices of all keys in the order of `number(keys)`, of equal numbers in the order of indices."""

    def __init__(self, keys: Keys, number: Callable[[Keys], Keys] = lambda keys: keys) -> None:
        self.keys, self.number, self.piece_size = keys, number, PIECE
        self._sorted: tuple[tuple[int, NDArray[np.int64]], ...] = ()  # the last two pieces by their starts

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def pieces(self) -> list[Piece]:
        """Return the bounds of all pieces; a small collection is one, for which nothing is counted."""
        count = len(self.keys)
        if count <= self.piece_size:
            return [Piece(0, count, np.uint64(0), np.uint64(2**64 - 1))]
        histogram = np.zeros(2**16, np.int64)
        for _, numbers in self._scan():
            histogram += np.bincount(numbers >> SHIFT, minlength=2**16)
        totals = np.concatenate([[0], np.cumsum(histogram)])
        wanted = np.arange(self.piece_size, count, self.piece_size)
        bounds = np.unique([0, *np.searchsorted(totals, wanted, side="right") - 1, 2**16]).tolist()
        return [
            Piece(int(totals[a]), int(totals[b]), np.uint64(a << 48), np.uint64((b - a << 48) - 1))
            for a, b in pairwise(bounds)
            if totals[a] < totals[b]
        ]

    def select(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the indices at positions `start` to `end` - 1."""
        parts = [
            self._sort(piece)[max(0, start - piece.start) : max(0, end - piece.start)]
            for piece in self.pieces
            if piece.start < end and start < piece.end
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Yield the indices of one piece after the other."""
        return map(self._sort, self.pieces)

    def _scan(self) -> Iterator[tuple[int, Keys]]:
        """Yield the first index and the numbers of some keys after the other."""
        for first in range(0, len(self.keys), SCAN):
            yield first, self.number(np.asarray(self.keys[first : first + SCAN]))

    def _sort(self, piece: Piece) -> NDArray[np.int64]:
        known = self._sorted  # read once, since two threads ask: the one that makes batches, and that of the log
        for start, indices in known:
            if start == piece.start:
                return indices
        if piece.end - piece.start == len(self.keys):
            indices = np.argsort(self.number(np.asarray(self.keys)), kind="stable")
        else:
            chosen, numbers = np.empty((2, piece.end - piece.start), np.uint64)
            filled = 0
            for first, scanned in self._scan():
                inside = np.flatnonzero(scanned - piece.low <= piece.span)
                end = filled + len(inside)
                chosen[filled:end], numbers[filled:end] = inside + first, scanned[inside]
                filled = end
            indices = chosen.view(np.int64)[np.argsort(numbers, kind="stable")]
        self._sorted = (*known[-1:], (piece.start, indices))
        return indices


def epoch_pieces(seed: int, epoch: int, keys: Keys) -> KeyOrder:
    """Return the order of `random_draws.epoch_order`, computed a piece at a time."""
    return KeyOrder(keys, partial(_order_bits, seed, epoch))


def _order_bits(seed: int, epoch: int, keys: Keys) -> Keys:
    return Draws(seed, epoch, keys).bits("order", 1)[:, 0]


def smallest(keys: Keys, count: int, number: Callable[[Keys], Keys] = lambda keys: keys) -> NDArray[np.int64]:
    """Return the indices of the keys of the smallest numbers, in the order of these."""
    return KeyOrder(keys, number).select(0, count).copy()  # not a view of a whole piece


class KeyFacts(NamedTuple):
    """What is known of all keys of a collection."""

    fingerprint: str  # a hash of them in ascending order
    distinct: bool


def examine_keys(keys: Keys) -> KeyFacts:
    """Return the fingerprint of keys, and whether all differ, without a sorted copy of all of them."""
    state, distinct = blake2b(digest_size=16), True
    for indices in KeyOrder(keys):
        ascending = np.asarray(keys[indices])
        distinct = distinct and not bool((ascending[1:] == ascending[:-1]).any())
        state.update(ascending.tobytes())
    return KeyFacts(state.hexdigest(), distinct)
