"""Checkpoints: written beside, synced, renamed; the newest few kept; resumed exactly. safetensors and JSON only.

checkpoints/step_N/{student, teacher, optimizer, centers}.safetensors + state.json + manifest.json (sizes and SHA-256 of
the others, written last), and checkpoints/latest, a link to the newest.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from adclr.config import UserError
from adclr.method import ADCLR
from adclr.runs import Run, read_json, sync_directory, write_json
from adclr.weights import fit, read_tensors


@dataclass(frozen=True)
class State:
    """What else a resumed run must know."""

    step: int  # steps done
    fingerprint: str  # of the collection
    meter: list[float]  # sums since the last line of metrics.jsonl


def save(run: Run, state: State, method: ADCLR, optimizer: torch.optim.Optimizer, keep: int) -> Path:
    """Writes a checkpoint, makes it the latest, and only then deletes the ones that are too many."""
    final = run.checkpoints / f"step_{state.step}"
    if (final / "manifest.json").exists():  # it was resumed from
        return final
    temporary = run.checkpoints / f".step_{state.step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, tensors in _parts(method, optimizer).items():
        _write(temporary / f"{name}.safetensors", tensors)
    write_json(temporary / "state.json", vars(state))
    files = sorted(path for path in temporary.iterdir())
    write_json(temporary / "manifest.json", {path.name: _facts(path) for path in files})
    os.rename(temporary, final)
    sync_directory(run.checkpoints)
    link = run.checkpoints / ".latest.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    os.replace(link, run.checkpoints / "latest")
    sync_directory(run.checkpoints)
    for old in steps(run)[:-keep]:
        shutil.rmtree(run.checkpoints / f"step_{old}")
    return final


def steps(run: Run) -> list[int]:
    """The steps of all whole checkpoints, ascending."""
    found = []
    for path in run.checkpoints.glob("step_*") if run.checkpoints.is_dir() else ():
        number = path.name.removeprefix("step_")
        if number.isdigit() and (path / "manifest.json").exists():
            found.append(int(number))
    return sorted(found)


def load(run: Run, method: ADCLR, optimizer: torch.optim.Optimizer) -> State | None:
    """Restores the latest checkpoint and says where it stands; None if there is none."""
    found = steps(run)
    if not found:
        return None
    folder = run.checkpoints / f"step_{found[-1]}"
    for name, facts in read_json(folder / "manifest.json").items():
        path = folder / Path(name).name
        if not path.exists() or _facts(path) != facts:
            raise UserError(
                f"checkpoint {folder} is damaged at {path.name}; delete that directory to go on from an older one"
            )
    parts = _parts(method, optimizer)
    for name, module in (
        ("student", method.student),
        ("teacher", method.teacher),
        ("centers", method.centers),
    ):
        tensors = read_tensors(folder / f"{name}.safetensors")
        fit(parts[name], tensors, folder / f"{name}.safetensors")
        module.load_state_dict(tensors)
    _load_optimizer(method.student, optimizer, read_tensors(folder / "optimizer.safetensors"))
    return State(**read_json(folder / "state.json"))


def _parts(method: ADCLR, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    return {
        "student": method.student.state_dict(),
        "teacher": method.teacher.state_dict(),
        "centers": method.centers.state_dict(),
        "optimizer": _optimizer_state(method.student, optimizer),
    }


def _optimizer_state(student: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by parameter name, so that it does not hang on an order."""
    return {
        f"{name}.{what}": value
        for name, parameter in student.named_parameters()
        for what, value in optimizer.state.get(parameter, {}).items()
    }


def _load_optimizer(student: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(student.named_parameters())
    optimizer.state.clear()
    for full, value in tensors.items():
        name, _, what = full.rpartition(".")
        parameter = parameters[name]
        # step counts lie where the fused kernel wants them, with the parameter
        optimizer.state[parameter][what] = value.to(parameter.device)


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _facts(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
