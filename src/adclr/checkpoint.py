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
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from adclr.config import UserError
from adclr.coverage import fit
from adclr.method import ADCLR
from adclr.runs import Run, read_json, sync_directory, write_json
from adclr.tensors import read_tensors


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
    """Writes a checkpoint, makes it the latest, and only then deletes the ones that are too many."""
    temporary = run.checkpoints / f".step_{state.step}.tmp"
    try:
        return _save(run, temporary, state, method, optimizer, keep)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            f"the checkpoint of step {state.step} cannot be written to {run.checkpoints} ({error}); "
            "make room there, and the same command goes on from the checkpoint before"
        ) from None


def _save(run: Run, temporary: Path, state: State, method: ADCLR, optimizer: torch.optim.Optimizer, keep: int) -> Path:
    final, latest = run.checkpoints / f"step_{state.step}", run.checkpoints / "latest"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, tensors in _parts(method, optimizer).items():
        _write(temporary / f"{name}.safetensors", tensors)
    write_json(temporary / "state.json", vars(state))
    files = sorted(path for path in temporary.iterdir())
    write_json(temporary / "manifest.json", {path.name: _facts(path) for path in files})
    shutil.rmtree(final, ignore_errors=True)  # half of one, if anything; a whole one is resumed from, not made again
    os.rename(temporary, final)
    sync_directory(run.checkpoints)
    link = run.checkpoints / ".latest.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    if latest.is_dir() and not latest.is_symlink():  # a copy that followed links made a directory of it
        shutil.rmtree(latest)
    os.replace(link, latest)
    sync_directory(run.checkpoints)
    for old in run.steps()[:-keep]:
        shutil.rmtree(run.checkpoints / f"step_{old}")
    return final


def load(run: Run, method: ADCLR, optimizer: torch.optim.Optimizer) -> State | None:
    """Restores the latest checkpoint and says where it stands; None if there is none."""
    found = run.steps()
    if not found:
        return None
    folder = run.checkpoints / f"step_{found[-1]}"
    manifest = read_json(folder / "manifest.json")
    names = [f"{name}.safetensors" for name in ("student", "teacher", "centers", "optimizer")] + ["state.json"]
    for name in names:
        path, facts = folder / name, manifest.get(name) if isinstance(manifest, dict) else None
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
    try:
        return State(**read_json(folder / "state.json"))
    except TypeError:
        raise UserError(f"{folder} is of another version of adclr; start the run anew in another --out") from None


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
