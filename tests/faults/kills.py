"""kill -9 at random moments of small runs, resumed each time: `python tests/faults/kills.py --kills 50`.

What is learned and logged must in the end be what an uninterrupted run learns and logs, to the bit, and no checkpoint
may ever be unreadable.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import lives
from adclr.data.sets import scenes
from adclr.system.runs import Run

# A checkpoint after every second step, so that many a kill falls into a save.
CHANGES = {"epochs": 25, "checkpoint_every_steps": 2, "log_every_steps": 3, "micro_batch_size": 4, "masked_weight": 1.0}


def work(data: Path, folder: Path, kills: int, seed: int, per_run: int = 5) -> Counter[str]:
    """Counts of what happened; the end of every run is asserted."""
    rng, counts = random.Random(seed), Counter[str]()
    code, _, errors = lives.finish(lives.start(data, folder / "whole", threads=1, **CHANGES))
    assert code == 0, errors
    wanted = lives.digest(folder / "whole")
    seconds = sum(row["seconds"] for row in Run(folder / "whole").rows("timing.jsonl"))
    while counts["kills"] < kills:
        out = folder / f"run_{counts['runs']}"
        for _ in range(min(per_run, kills - counts["kills"])):
            before, process = lives.starts(out), lives.start(data, out, threads=1, **CHANGES)
            lives.until(lambda out=out, before=before: lives.starts(out) > before, process)
            time.sleep(rng.uniform(0, 1.5 * seconds / per_run))
            lives.kill(process)
            if Run(out).finished:  # it came to its end first
                break
            step = lives.newest(out)
            counts["kills"] += 1
            counts["in a save"] += any((out / "checkpoints").glob(".step_*.tmp"))
            counts["before the first checkpoint"] += step is None
            counts["in mid-epoch"] += step is not None and step % 4 != 0
        code, _, errors = lives.finish(lives.start(data, out, threads=1, **CHANGES))
        assert code == 0, errors
        assert lives.digest(out) == wanted, out
        counts["runs"] += 1
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        scenes.write_scenes(Path(place) / "data", seed=3, num_train=32, num_val=16, size=24, show=False)
        print(dict(work(Path(place) / "data" / "train", Path(place), given.kills, given.seed)))
