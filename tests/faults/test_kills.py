"""kill -9 at random moments: five here, fifty by `python tests/faults/kills.py`."""

from __future__ import annotations

from pathlib import Path

import kills


def test_a_run_killed_five_times_ends_as_if_it_had_not_been(images: Path, tmp_path: Path) -> None:
    counts = kills.work(images / "train", tmp_path, 5, seed=1)
    assert counts["kills"] == 5
