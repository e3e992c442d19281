"""Checkpoints of a pretraining: {student, teacher, optimizer, centers}.safetensors and where it stands.

How they are written is in `snapshot`; resumed exactly.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from adclr.config.sections import UserError
from adclr.model.method import ADCLR
from adclr.system import distributed
from adclr.system.runs import Run
from adclr.training.meter import checked
from adclr.training.sharding import state_of
from adclr.weights import snapshot
from adclr.weights.snapshot import Parts
from adclr.weights.tensors import fit_tensors

NAMES = [f"{name}.safetensors" for name in ("student", "teacher", "centers", "optimizer")] + ["state.json"]


Count = Annotated[int, Field(strict=True, ge=1, le=2**53)]


@dataclass(frozen=True)
class State:
    """What else a resumed run must know."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: Count  # steps done
    steps_per_epoch: Count
    fingerprint: str  # of the collection
    # what has been metered since the last line of metrics.jsonl
    meter: Annotated[dict[str, Any], AfterValidator(checked)]
    processes: Count
    micro_batch_size: Count


def parts(method: ADCLR, optimizer: torch.optim.Optimizer) -> Parts:
    """All tensors of a checkpoint, where they lie."""
    return {
        "student": method.student.state_dict(),
        "teacher": method.teacher.state_dict(),
        "centers": method.centers.state_dict(),
        "optimizer": snapshot.optimizer_state(method.student, optimizer, state_of),
    }


def write(run: Run, state: State, tensors: Parts, keep: int) -> Path:
    """Writes tensors on the CPU, makes that the latest, and only then deletes the checkpoints that are too many."""
    return snapshot.write(run, state.step, tensors, vars(state), keep)


def load_before(step: int, run: Run, method: ADCLR, optimizer: torch.optim.AdamW) -> State | None:
    """Restores the newest whole checkpoint in which a step is not done yet, and changes nothing on the disk."""
    found = snapshot.newest(run, NAMES, before=step)
    return None if found.step is None else _restore(run.checkpoints / f"step_{found.step}", method, optimizer)


def load(run: Run, method: ADCLR, optimizer: torch.optim.AdamW) -> State | None:
    """Restores the newest whole checkpoint and says where it stands; None if there is none.

    The first process looks which that is, and sets newer ones that are damaged aside; all read the same.
    """
    device = next(method.parameters()).device
    found = snapshot.newest(run, NAMES) if distributed.is_main() else snapshot.Found(None, {})
    number = -1 if found.step is None else found.step
    agreed = torch.tensor([number + 2 if distributed.is_main() else 0, bool(found.damaged)], device=device)
    step, damaged = distributed.sum_(agreed).tolist()
    if step == 1:
        if damaged:
            first = next(iter(found.damaged.items()), (0, "another process says so"))
            raise UserError(
                f"checkpoint {run.checkpoints}/step_{first[0]} is damaged at {first[1]} and no other is whole; "
                "restore it, or delete that directory to start anew"
            )
        return None
    if found.damaged:
        _set_aside(run, found.damaged, step - 2)
    return _restore(run.checkpoints / f"step_{step - 2}", method, optimizer)


def _set_aside(run: Run, damaged: Mapping[int, str], going_on_from: int) -> None:
    """Damaged checkpoints must not be counted among those that are kept; `latest` leads past them first."""
    for step, name in damaged.items():
        folder = run.checkpoints / f"step_{step}"
        aside = folder.with_name(f"{folder.name}.damaged")
        try:
            snapshot.point(run, f"step_{going_on_from}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(folder, aside)
        except OSError as error:
            raise UserError(
                f"checkpoint {folder} is damaged at {name} and cannot be moved ({error.strerror}); delete it by hand"
            ) from None
        print(
            f"checkpoint step_{step} is damaged at {name} and is now called {aside.name}; "
            f"training goes on from step {going_on_from}",
            file=sys.stderr,
        )


def _restore(folder: Path, method: ADCLR, optimizer: torch.optim.AdamW) -> State:
    wanted = parts(method, optimizer)
    stored, state = snapshot.load(folder, list(wanted))
    for name, module in (
        ("student", method.student),
        ("teacher", method.teacher),
        ("centers", method.centers),
    ):
        fit_tensors(wanted[name], stored[name], folder / f"{name}.safetensors")
        module.load_state_dict(stored[name])
    snapshot.load_optimizer(method.student, optimizer, stored["optimizer"], folder / "optimizer.safetensors")
    return _state(state, folder)


def _state(stored: Any, folder: Path) -> State:
    """What state.json says, if it can be: a number in it may make the loop go wrong long after this."""
    try:
        found: State = TypeAdapter(State).validate_python(stored)
        if folder.name != f"step_{found.step}" or any(row[0] > found.step for row in found.meter["void"]):
            raise ValueError
    except ValueError as error:  # pydantic's too
        first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else None
        what = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}" if first else "steps of another place"
        raise UserError(
            f"{folder}/state.json is not as this version of adclr writes it ({what[:200]}); "
            "delete that directory to go on from an older one, or choose another --out"
        ) from None
    return found
