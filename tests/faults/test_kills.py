"""kill -9 at random moments: five here, fifty by `python tests/faults/kills.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

import adclr as package
import kills
import lives
from tiny import TINY


@pytest.mark.full
def test_a_run_killed_five_times_ends_as_if_it_had_not_been(images: Path, tmp_path: Path) -> None:
    counts = kills.work(images / "train", tmp_path, 5, seed=1)
    assert counts["kills"] == 5


def test_the_same_seed_twice_is_the_same_to_the_bit(images: Path, tmp_path: Path) -> None:
    """In deterministic mode, one here and one in another process; another seed is another run."""
    changes = {"deterministic": True, "masked_weight": 1.0}
    process = lives.start(images / "train", tmp_path / "there", **changes)
    here = package.pretrain(images / "train", out=tmp_path / "here", **(TINY | changes))
    other = package.pretrain(images / "train", out=tmp_path / "other", **(TINY | changes | {"seed": 1}))
    code, _, errors = lives.finish(process)
    assert code == 0, errors
    assert lives.digest(here.path) == lives.digest(tmp_path / "there") != lives.digest(other.path)
