"""Collapses that are forced, and runs that are healthy: `python tests/faults/collapses.py` (217 or 465 steps each).

Every forced one must be named, by its name, within 200 steps; of a healthy one nothing may be said. A run is healthy if
its kNN score at the end is above the untrained network's, which all of the healthy ones must be.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import adclr
from adclr.data.sets import scenes
from adclr.report import health
from adclr.system.runs import Run

EVERY = 20  # steps between looks
# as small as learns something of the scenes in 200 steps
SMALL: dict[str, Any] = {
    "recipe": "demo_adclr",
    "dim": 48,
    "depth": 3,
    "patch_size": 4,
    "global_size": 16,
    "local_size": 8,
    "num_local": 1,
    "head_hidden_dim": 64,
    "head_bottleneck_dim": 32,
    "train.batch_size": 32,
    "train.epochs": 7,
    "log_every_steps": EVERY,
    "health_every_steps": EVERY,
}
FORCED: dict[str, tuple[str, dict[str, Any]]] = {
    "no centering": ("constant collapse", {"center_momentum": 1.0}),
    "no sharpening": ("uniform collapse", {"teacher_temperature": 1.0, "teacher_temperature_start": 1.0}),
    "both ways, Q = 200, N = 16": ("collapse onto the queries", {"query_keys": "all", "num_queries": 200}),
}
LONGER: dict[str, Any] = {"train.epochs": 15}  # in 217 steps these learn little, or nothing
# The paper's temperatures; its learning rate and momentum are for hundreds of thousands of steps.
SLOW: dict[str, Any] = LONGER | {
    "teacher_temperature": 0.07,
    "teacher_temperature_warmup_epochs": 5,
    "lr": 4e-3,
    "momentum": 0.98,
}
HEALTHY: dict[str, dict[str, Any]] = (
    {f"ADCLR, seed {seed}": LONGER | {"seed": seed} for seed in range(3)}
    | {f"ADCLR*, seed {seed}": LONGER | {"seed": seed, "masked_weight": 1.0} for seed in range(3)}
    | {f"ADCLR, paper's temperatures, seed {seed}": SLOW | {"seed": seed} for seed in range(2)}
    | {"ADCLR, 4096 prototypes": {"num_prototypes": 4096}, "ADCLR, Sinkhorn": {"target": "sinkhorn"}}
)


def findings(run: Run) -> list[tuple[int, str]]:
    """(step, what is said) of a run."""
    looks = [row for row in run.rows("metrics.jsonl") if "target_kl" in row]
    found = [(int(row["step"]), health.diagnose(looks[: number + 1])) for number, row in enumerate(looks)]
    return [(step, finding.name) for step, finding in found if finding is not None]


def train(data: Path, out: Path, **changes: Any) -> Run:
    shutil.rmtree(out, ignore_errors=True)
    return adclr.pretrain(data / "train", out=out, **(SMALL | changes))


def work(data: Path, out: Path) -> None:
    for name, (wanted, changes) in FORCED.items():
        found = findings(train(data, out, **changes))
        print(f"{name}: {found[0] if found else 'nothing said'}", flush=True)
        assert found, name
        assert {said for _, said in found} == {wanted}, found
        assert found[0][0] <= 200, found
    alarms = healthy = 0
    for name, changes in HEALTHY.items():
        run = train(data, out, **(changes | {"probe.data": str(data), "every_epochs": 100}))
        before, after = (row["knn_top1"] for row in run.rows("metrics.jsonl") if "knn_top1" in row)
        told = [row["target_kl"] for row in run.rows("metrics.jsonl") if "target_kl" in row]
        found = findings(run)
        healthy, alarms = healthy + (after > before), alarms + bool(found)
        least = min(told) / told[0]
        print(
            f"{name}: kNN {before:.1f} -> {after:.1f} %, least KL {least:.2f} of the first, {found or 'nothing said'}"
        )
        sys.stdout.flush()
    print(f"{len(HEALTHY)} runs, {healthy} better than untrained, {alarms} alarms")
    assert healthy == len(HEALTHY)
    assert alarms == 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        scenes.write_scenes(Path(place) / "data", seed=5, num_train=1000, num_val=200, size=24, show=False)
        work(Path(place) / "data", Path(place) / "run")
