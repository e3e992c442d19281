"""Everything at once: `python tests/faults/soak.py` (as root, for a disk that is full).

5000 tiny steps on a collection of which 5 % cannot be read, killed 20 times, on a file system that is full 3 times. In
the end: the state of a run to which nothing happened, at least 95 % of the steps that were done kept, and memory,
handles and threads of the last process flat.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import lives
from adclr.data.sets import scenes
from adclr.system.runs import Run

CHANGES: dict[str, Any] = {
    "checkpoint_every_steps": 10,
    "free_checkpoints": "false",
    "max_unreadable": 0.2,
    "cache": "off",
    "num_workers": 2,
    "health_every_steps": 500,
}


def last_step(run: Path) -> int:
    return max((int(row["step"]) for row in Run(run).rows("metrics.jsonl")), default=0)


def used(process: subprocess.Popen[str]) -> dict[str, int]:
    with open(f"/proc/{process.pid}/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    folder = Path(f"/proc/{process.pid}")
    return {
        "resident_mib": resident // 2**20,
        "handles": len(list((folder / "fd").iterdir())),
        "threads": len(list((folder / "task").iterdir())),
    }


def fill(place: Path, seconds: float) -> None:
    """Takes all room for a while."""
    with open(place / "filler", "wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass
    time.sleep(seconds)
    (place / "filler").unlink()


def work(
    data: Path, place: Path, reference: Path, steps: int, kills: int, fulls: int, least: float = 0.95
) -> dict[str, Any]:
    """`least` is the share of the steps done that must have been kept: of a short run a kill takes more."""
    rng, changes = random.Random(0), CHANGES | {"epochs": steps // (200 // 8)}
    code, _, errors = lives.finish(lives.start(data, reference, threads=1, **changes), 7200)
    assert code == 0, errors
    out, done, ended, said = place / "run", 0, 0, ""
    events = ["kill"] * kills + ["full"] * fulls
    rng.shuffle(events)
    every = int(0.7 * steps / len(events))  # the last process has the rest to itself
    process, begun = lives.start(data, out, threads=1, **changes), 0
    for number, event in enumerate(events, 1):
        wanted = max(begun + 1, number * every + rng.randrange(-every // 3, every // 3))
        lives.until(lambda wanted=wanted: last_step(out) >= wanted, process, 1800)
        if event == "full":
            fill(place, 1.0)
            before, deadline = lives.newest(out), time.monotonic() + 60
            while process.poll() is None and lives.newest(out) == before and time.monotonic() < deadline:
                time.sleep(0.01)
            if process.poll() is None:
                continue  # it goes on, and has saved
            ended += 1  # three saves in a row had failed
            code, _, errors = lives.finish(process)
            assert code == 2, errors
            said += errors
        else:
            said += lives.kill(process)
        newest = lives.newest(out)
        done += last_step(out) - begun
        begun, process = newest or 0, lives.start(data, out, threads=1, **changes)
    middle = (begun + steps) // 2
    lives.until(lambda: last_step(out) >= middle, process, 1800)
    early = used(process)
    late = early
    while process.poll() is None and last_step(out) < steps - 20:
        late = used(process)
        time.sleep(0.2)
    code, _, errors = lives.finish(process, 1800)
    assert code == 0, errors
    said, done = said + errors, done + steps - begun
    actual = {
        "steps": steps,
        "steps_done": done,
        "kept": steps / done,
        "kills": kills,
        "disks_full": fulls,
        "of_which_ended_it": ended,
        "saves_failed": " ".join(said.split()).count("cannot be written to"),  # lines may be broken anywhere
        "unreadable": len(list(Run(out).rows("quarantine.jsonl"))),
        "same_state": lives.digest(out) == lives.digest(reference),
        "early": early,
        "late": late,
    }
    print(json.dumps(actual, indent=2))
    assert actual["same_state"]
    assert actual["saves_failed"] >= fulls
    assert actual["unreadable"] == 10  # of `collection`
    assert steps / done >= least
    assert late["resident_mib"] - early["resident_mib"] < 32
    assert late["handles"] <= early["handles"] + 2  # images that are being read just then
    assert late["threads"] <= early["threads"] + 1  # the one that writes a checkpoint
    return actual


def collection(folder: Path) -> Path:
    """200 images, 10 of them broken."""
    scenes.write_scenes(folder, seed=3, num_train=200, num_val=16, size=24, show=False)
    for path in sorted((folder / "train").rglob("*.png"))[::20]:
        path.write_bytes(path.read_bytes()[:60])
    return folder / "train"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--fulls", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        root, small = Path(text), Path(text) / "small"
        small.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(small)], check=True)
        try:
            work(collection(root / "data"), small, root / "whole", given.steps, given.kills, given.fulls)
        finally:
            subprocess.run(["umount", "--lazy", str(small)], check=True)
