"""Checkpoints of a training: {student, teacher, optimizer, centers}.safetensors and state.json.

That of a distillation has student and optimizer only: its teacher does not change.

`weights.snapshot` writes the files; a resumed run continues exactly.
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

from adclr.config.parsing import UserError
from adclr.system import distributed
from adclr.system.runs import Run
from adclr.training.fsdp import state_of
from adclr.training.meter import check_state
from adclr.training.methods import Method, saved_modules
from adclr.weights import snapshot
from adclr.weights.snapshot import Parts
from adclr.weights.tensors import fit_tensors

NAMES = [f"{name}.safetensors" for name in ("student", "teacher", "centers", "optimizer")] + ["state.json"]
Count = Annotated[int, Field(strict=True, ge=1, le=2**53)]


@dataclass(frozen=True)
class State:
    """The content of state.json: what a resumed run needs beside the tensors."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: Count  # steps done
    steps_per_epoch: Count
    fingerprint: str  # of the collection
    meter: Annotated[dict[str, Any], AfterValidator(check_state)]  # since the last line of metrics.jsonl
    processes: Count
    micro_batch_size: Count


def parts(method: Method, optimizer: torch.optim.Optimizer) -> Parts:
    """Return all tensors of a checkpoint, on the device they are on."""
    states = {name: module.state_dict() for name, module in saved_modules(method).items()}
    return states | {"optimizer": snapshot.optimizer_state(method.student, optimizer, state_of)}


def _names(method: Method) -> list[str]:
    """Return the files of a checkpoint."""
    parts = {*saved_modules(method), "optimizer", "state"}
    return [name for name in NAMES if name.partition(".")[0] in parts]


def write(run: Run, state: State, tensors: Parts, keep: int) -> Path:
    """Write tensors on the CPU as the latest checkpoint, then delete all but the newest `keep`."""
    return snapshot.write(run, state.step, tensors, vars(state), keep)


def load_before(step: int, run: Run, method: Method, optimizer: torch.optim.AdamW) -> State | None:
    """Restore the newest whole checkpoint in which a step is not done yet, and change nothing on the disk."""
    newest = snapshot.find_newest(run, _names(method), before=step)
    return None if newest.step is None else _restore(run.checkpoints / f"step_{newest.step}", method, optimizer)


def load(run: Run, method: Method, optimizer: torch.optim.AdamW) -> State | None:
    """Restore the newest whole checkpoint and return its state; None if there is none.

    The first process finds it, and renames newer ones that are damaged; all processes read the same.
    """
    device = next(method.parameters()).device
    newest = snapshot.find_newest(run, _names(method)) if distributed.is_main() else snapshot.Newest(None, {})
    number = -1 if newest.step is None else newest.step
    # the first process adds its step + 2, the others 0: a sum of 1 is no checkpoint
    message = torch.tensor([number + 2 if distributed.is_main() else 0, bool(newest.damaged)], device=device)
    step, damaged = distributed.all_reduce_sum(message).tolist()
    if step == 1:
        if damaged:
            first = next(iter(newest.damaged.items()), (0, "another process says so"))
            raise UserError(
                f"checkpoint {run.checkpoints}/step_{first[0]} is damaged at {first[1]} and no other is whole; "
                "restore it, or delete that directory to start anew"
            )
        return None
    if newest.damaged:
        _rename_damaged(run, newest.damaged, step - 2)
    return _restore(run.checkpoints / f"step_{step - 2}", method, optimizer)


def _rename_damaged(run: Run, damaged: Mapping[int, str], resumed_step: int) -> None:
    """Rename damaged checkpoints to step_N.damaged, so that they do not count as checkpoints; first change `latest`."""
    for step, name in damaged.items():
        folder = run.checkpoints / f"step_{step}"
        renamed = folder.with_name(f"{folder.name}.damaged")
        try:
            snapshot.set_latest(run, f"step_{resumed_step}")
            shutil.rmtree(renamed, ignore_errors=True)
            os.rename(folder, renamed)
        except OSError as error:
            raise UserError(
                f"checkpoint {folder} is damaged at {name} and cannot be moved ({error.strerror}); delete it by hand"
            ) from None
        print(
            f"checkpoint step_{step} is damaged at {name} and is now called {renamed.name}; "
            f"training resumes from step {resumed_step}",
            file=sys.stderr,
        )


def _restore(folder: Path, method: Method, optimizer: torch.optim.AdamW) -> State:
    """Load the tensors of a checkpoint into method and optimizer, and return its state."""
    expected = parts(method, optimizer)
    stored, state = snapshot.load(folder, list(expected))
    for name, module in saved_modules(method).items():
        fit_tensors(expected[name], stored[name], folder / f"{name}.safetensors")
        module.load_state_dict(stored[name])
    snapshot.load_optimizer(method.student, optimizer, stored["optimizer"], folder / "optimizer.safetensors")
    return _state(state, folder)


def _state(stored: Any, folder: Path) -> State:
    """Return state.json, checked: a wrong number in it might fail only much later, in the loop."""
    try:
        state: State = TypeAdapter(State).validate_python(stored)
        if folder.name != f"step_{state.step}" or any(row[0] > state.step for row in state.meter["void"]):
            raise ValueError
    except ValueError as error:  # pydantic's too
        first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else None
        reason = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}" if first else "steps of another place"
        raise UserError(
            f"{folder}/state.json is not as this version of adclr writes it ({reason[:200]}); "
            "delete that directory to resume from an older one, or choose another --out"
        ) from None
    return state
