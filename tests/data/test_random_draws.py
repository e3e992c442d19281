"""Random numbers hang on their key alone and are random."""

from __future__ import annotations

import numpy as np

from adclr.data.random_draws import Draws, combine, epoch_order, key_of

KEYS = np.array([key_of(f"photo {i}.jpg") for i in range(4000)], np.uint64)


def test_numbers_do_not_hang_on_the_batch_or_on_what_was_drawn_before() -> None:
    whole = Draws(7, 3, KEYS)
    part = Draws(7, 3, KEYS[[17, 5]])
    part.uniform("something else", 9)
    assert np.array_equal(part.uniform("flip", 4), whole.uniform("flip", 4)[[17, 5]])
    assert np.array_equal(part.uniform("flip", 2), whole.uniform("flip", 4)[[17, 5], :2])  # places neither


def test_every_part_of_the_key_counts() -> None:
    base = Draws(7, 3, KEYS).uniform("flip", 1)[:, 0]
    others = [
        Draws(8, 3, KEYS).uniform("flip", 1)[:, 0],
        Draws(7, 4, KEYS).uniform("flip", 1)[:, 0],
        Draws(7, 3, KEYS).uniform("flop", 1)[:, 0],
        Draws(7, 3, KEYS).uniform("flip", 2)[:, 1],
        np.roll(base, 1),
    ]
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.06  # 4 deviations of 4000 independent pairs
    assert combine(1, 2) != combine(2, 1)


def test_numbers_are_uniform() -> None:
    drawn = Draws(0, 0, KEYS).uniform("area", 10, low=2.0, high=5.0)
    assert drawn.min() >= 2
    assert drawn.max() < 5
    share, _ = np.histogram(drawn, bins=20, range=(2, 5))
    expected = drawn.size / 20
    assert ((share - expected) ** 2 / expected).sum() < 45  # chi-square of 19, about 1 in 1000
    chance = Draws(0, 0, KEYS).chance("grey", 0.2, 10).mean()
    assert abs(chance - 0.2) < 0.01


def test_permutations_are_all_alike() -> None:
    orders = Draws(0, 0, KEYS).permutation("order", 3, 4).reshape(-1, 3)
    _, counts = np.unique(orders @ np.array([9, 3, 1]), return_counts=True)
    assert len(counts) == 6
    assert abs(counts / counts.mean() - 1).max() < 0.1


def test_a_file_less_moves_no_other_in_the_order() -> None:
    order = epoch_order(1, 2, KEYS)
    assert sorted(order) == list(range(len(KEYS)))
    assert not np.array_equal(order, epoch_order(1, 3, KEYS))
    fewer = np.delete(KEYS, 100)
    kept = [i for i in order if i != 100]
    assert [i if i < 100 else i + 1 for i in epoch_order(1, 2, fewer)] == kept


def test_keys_are_the_same_on_every_machine() -> None:
    key = key_of("a/b.jpg")
    assert key == 0xAECC9F4D3B67ED67
    assert Draws(1, 2, np.array([key], np.uint64)).uniform("flip", 1)[0, 0] == 0.05581177815372096
