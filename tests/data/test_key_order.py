"""The order of an epoch in pieces is the order of one sort, whatever the pieces and whoever asks."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch

from adclr.data import key_order
from adclr.data.batches import TrainingBatches
from adclr.data.decode import Decoder
from adclr.data.feed import Feed
from adclr.data.key_order import KeyOrder, epoch_pieces, examine_keys, smallest
from adclr.data.random_draws import Draws, Keys, mix
from adclr.data.sources import ImageFolder
from adclr.system import distributed
from tiny import tiny


def random_keys(rng: np.random.Generator, count: int) -> Keys:
    """Random keys of which some are equal, as those of two files whose hashes collide."""
    keys = rng.integers(0, 2**64, count, dtype=np.uint64)
    keys[rng.integers(0, count, count // 10)] = keys[rng.integers(0, count, count // 10)]
    return keys


def one_sort(seed: int, epoch: int, keys: Keys) -> list[int]:
    """The formula that runs have been trained by since version 0.1."""
    order: list[int] = np.argsort(Draws(seed, epoch, keys).bits("order", 1)[:, 0], kind="stable").tolist()
    return order


@pytest.mark.parametrize("case", range(25))
def test_pieces_are_the_parts_of_one_sort(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(case)
    count = int(rng.integers(1, 5000))
    monkeypatch.setattr(key_order, "SCAN", int(rng.integers(1, 600)))
    monkeypatch.setattr(key_order, "PIECE", int(rng.integers(1, 1 + 2 * count)))
    keys, seed, epoch = random_keys(rng, count), int(rng.integers(0, 2**31)), int(rng.integers(0, 300))
    expected = one_sort(seed, epoch, keys)
    order = epoch_pieces(seed, epoch, keys)
    assert np.concatenate(list(order)).tolist() == expected
    assert [piece.start for piece in order.pieces[1:]] == [piece.end for piece in order.pieces[:-1]]
    for start, length in rng.integers(0, count, (10, 2)).tolist():  # also beyond the end, and several pieces at once
        assert order.select(start, start + length).tolist() == expected[start : start + length]
    assert len(order._sorted) <= 2  # and no more are kept


def test_pieces_are_no_larger_than_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_order, "PIECE", 10_000)
    keys = random_keys(np.random.default_rng(0), 200_000)
    sizes = [piece.end - piece.start for piece in KeyOrder(keys, mix).pieces]
    assert sum(sizes) == 200_000
    assert max(sizes) < 10_000 + 200_000 / 2**16 * 10  # beside the last bucket of a piece
    assert len(sizes) <= 22
    monkeypatch.setattr(key_order, "PIECE", 10)
    equal = KeyOrder(np.full(1000, 7, np.uint64), mix)  # of one number: a piece that cannot be cut
    assert np.concatenate(list(equal)).tolist() == list(range(1000))


def test_the_facts_of_keys_are_those_of_a_sorted_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.unique(np.random.default_rng(1).integers(0, 2**64, 3000, dtype=np.uint64))
    np.random.default_rng(2).shuffle(keys)
    twice = np.append(keys, keys[5])
    for piece in (100, 2**22):
        monkeypatch.setattr(key_order, "PIECE", piece)
        for some, distinct in ((keys, True), (twice, False)):
            facts = examine_keys(some)
            assert facts.fingerprint == blake2b(np.sort(some).tobytes(), digest_size=16).hexdigest()
            assert facts.distinct == distinct
        assert smallest(keys, 50, mix).tolist() == np.argsort(mix(keys), kind="stable")[:50].tolist()
        assert smallest(keys[:20], 50).tolist() == np.argsort(keys[:20], kind="stable").tolist()


def test_processes_and_a_resume_get_the_same_steps_from_pieces(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, source = tiny(), ImageFolder(images / "train")  # 2 epochs of 4 steps of 8 images

    def steps(start: int) -> list[tuple[int, list[int]]]:
        batches = TrainingBatches(settings, Feed(source, 1, Decoder()), torch.device("cpu"), 4)
        return [(epoch, indices.tolist()) for epoch, indices in batches._micro_batches(start)]

    whole = steps(0)
    orders = [one_sort(settings.train.seed, epoch, source.keys) for epoch in (0, 1)]
    assert [indices for _, indices in whole] == [order[i : i + 4] for order in orders for i in range(0, 32, 4)]
    monkeypatch.setattr(key_order, "PIECE", 5)
    assert steps(0) == whole
    assert steps(3) == whole[6:]  # in the middle of an epoch, and of a piece
    assert steps(6) == whole[12:]
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    ranks = []
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        ranks.append(steps(0))
    assert [part for pair in zip(*ranks, strict=True) for part in pair] == whole
