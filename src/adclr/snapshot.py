"""A folder of tensors and a few numbers that is there whole or not at all: safetensors and JSON, nothing pickled.

FOLDER/{PART.safetensors, ...} + state.json + manifest.json, which holds sizes and SHA-256 of the others and is written
last. Of a training, the folders are called step_N; which of them are whole is `runs.Run.steps`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from adclr.config import UserError
from adclr.runs import Run, read_json, sync_directory, write_json
from adclr.weights import read_tensors

Parts = dict[str, dict[str, Tensor]]


def save(run: Run, step: int, parts: Parts, state: Mapping[str, Any], keep: int) -> Path:
    """Writes the checkpoint of a step, makes it the latest, and only then deletes the ones that are too many."""
    temporary = run.checkpoints / f".step_{step}.tmp"
    try:
        return _save(run, temporary, step, parts, state, keep)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            f"the checkpoint of step {step} cannot be written to {run.checkpoints} ({error}); "
            "make room there, and the same command goes on from the checkpoint before"
        ) from None


def _save(run: Run, temporary: Path, step: int, parts: Parts, state: Mapping[str, Any], keep: int) -> Path:
    final, latest = run.checkpoints / f"step_{step}", run.checkpoints / "latest"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, tensors in parts.items():
        _write(temporary / f"{name}.safetensors", tensors)
    write_json(temporary / "state.json", dict(state))
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


def load(folder: Path, names: Sequence[str]) -> tuple[Parts, Any]:
    """The named parts and the state; refuses a folder that is not as it was written."""
    manifest = read_json(folder / "manifest.json")
    for name in [f"{name}.safetensors" for name in names] + ["state.json"]:
        path, facts = folder / name, manifest.get(name) if isinstance(manifest, dict) else None
        if not path.exists() or _facts(path) != facts:
            raise UserError(
                f"checkpoint {folder} is damaged at {path.name}; delete that directory to go on from an older one"
            )
    return {name: read_tensors(folder / f"{name}.safetensors") for name in names}, read_json(folder / "state.json")


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by parameter name, so that it does not hang on an order."""
    return {
        f"{name}.{what}": value
        for name, parameter in model.named_parameters()
        for what, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
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
