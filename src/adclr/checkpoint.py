"""Checkpoints of a pretraining: written beside, synced, renamed; the newest few kept; resumed exactly.

checkpoints/step_N/{student, teacher, optimizer, centers}.safetensors + state.json + manifest.json (see `snapshot`), and
checkpoints/latest, a link to the newest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from adclr import snapshot
from adclr.config import UserError
from adclr.method import ADCLR
from adclr.runs import Run
from adclr.snapshot import Parts
from adclr.weights import fit


@dataclass(frozen=True)
class State:
    """What else a resumed run must know."""

    step: int  # steps done
    steps_per_epoch: int
    fingerprint: str  # of the collection
    meter: list[float]  # sums since the last line of metrics.jsonl, mean over the processes
    processes: int
    micro_batch_size: int


def save(run: Run, state: State, method: ADCLR, optimizer: torch.optim.Optimizer, keep: int) -> Path:
    return snapshot.save(run, state.step, _parts(method, optimizer), vars(state), keep)


def load(run: Run, method: ADCLR, optimizer: torch.optim.Optimizer) -> State | None:
    """Restores the latest checkpoint and says where it stands; None if there is none."""
    found = run.steps()
    if not found:
        return None
    folder = run.checkpoints / f"step_{found[-1]}"
    parts = _parts(method, optimizer)
    stored, state = snapshot.load(folder, list(parts))
    for name, module in (
        ("student", method.student),
        ("teacher", method.teacher),
        ("centers", method.centers),
    ):
        fit(parts[name], stored[name], folder / f"{name}.safetensors")
        module.load_state_dict(stored[name])
    snapshot.load_optimizer(method.student, optimizer, stored["optimizer"])
    try:
        return State(**state)
    except TypeError:
        raise UserError(f"{folder} is of another version of adclr; start the run anew in another --out") from None


def _parts(method: ADCLR, optimizer: torch.optim.Optimizer) -> Parts:
    return {
        "student": method.student.state_dict(),
        "teacher": method.teacher.state_dict(),
        "centers": method.centers.state_dict(),
        "optimizer": snapshot.optimizer_state(method.student, optimizer),
    }
