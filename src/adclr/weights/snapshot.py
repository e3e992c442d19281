"""Checkpoints: folders of tensors and a few numbers, written atomically as safetensors and JSON, nothing pickled.

RUN/checkpoints/step_N/{PART.safetensors, ...} + state.json + manifest.json (sizes and SHA-256 of the others, written
last), and checkpoints/latest, a link to the newest. Whenever a process is killed, a folder named step_N is complete;
names that begin with a dot are leftovers, which the next start removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adclr.config.parsing import UserError
from adclr.system.files import read_json, sync, write_json, write_synced
from adclr.system.runs import Run
from adclr.weights.tensors import fit_tensors, read_tensors

Parts = dict[str, dict[str, Tensor]]
StateOf = Callable[[torch.optim.Optimizer, nn.Parameter], Mapping[str, Tensor]]
PIECE = 2**24  # bytes written at a time; between two of them other threads have Python's lock
_TYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.int64: "I64"}


def save(run: Run, step: int, parts: Parts, state: Mapping[str, Any], keep: int) -> Path:
    """Write tensors of any device as a checkpoint; a disk that does not take them is a `UserError`."""
    on_cpu = {part: {name: tensor.detach().cpu() for name, tensor in named.items()} for part, named in parts.items()}
    try:
        return write(run, step, on_cpu, state, keep)
    except OSError as error:
        raise UserError(
            f"the checkpoint of step {step} cannot be written to {run.checkpoints} ({error.strerror or error}); "
            "make room there, and the same command resumes from the checkpoint before"
        ) from None


def write(run: Run, step: int, tensors: Parts, state: Mapping[str, Any], keep: int) -> Path:
    """Write tensors on the CPU as the latest checkpoint; only then delete the oldest, so that `keep` remain."""
    temporary = run.checkpoints / f".step_{step}.tmp"
    try:
        _fill(temporary, state, tensors)
        final = _publish(run, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    delete_old(run, keep)
    return final


def _fill(folder: Path, state: Mapping[str, Any], tensors: Parts) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    manifest = {f"{name}.safetensors": _write(folder / f"{name}.safetensors", part) for name, part in tensors.items()}
    write_json(folder / "state.json", dict(state))
    manifest["state.json"] = describe_file(folder / "state.json")
    write_json(folder / MANIFEST, manifest)  # and syncs the folder


def _publish(run: Run, folder: Path) -> Path:
    """Give a complete checkpoint its name, and make it the latest."""
    final = run.checkpoints / folder.name[1:].removesuffix(".tmp")
    if final.exists():  # of a run that was copied, or set back: a complete one would have been resumed from
        _remove(final)
    if not run.steps():
        sync(run.path)  # that there are checkpoints
    os.rename(folder, final)
    sync(run.checkpoints)
    set_latest(run, final.name)
    return final


def set_latest(run: Run, name: str) -> None:
    """Make a checkpoint the latest."""
    link, latest = run.checkpoints / ".latest.tmp", run.checkpoints / "latest"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    if latest.is_dir() and not latest.is_symlink():  # a copy that followed links made a directory of it
        shutil.rmtree(latest)
    os.replace(link, latest)
    sync(run.checkpoints)


def delete_old(run: Run, keep: int) -> int:
    """Delete all but the newest few; return how many. One that cannot be deleted stays, which harms nothing."""
    num_deleted = 0
    for old in run.steps()[:-keep]:
        with suppress(OSError):
            _remove(run.checkpoints / f"step_{old}")
            num_deleted += 1
    return num_deleted


def _remove(folder: Path) -> None:
    """Delete a checkpoint; at no moment does half of one have the name of a complete one."""
    renamed = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(renamed, ignore_errors=True)
    os.rename(folder, renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def remove_leftovers(run: Run) -> None:
    """Remove what a killed process left behind; only for a process that holds the lock of the run."""
    for path in [*run.path.glob(".*.tmp"), *run.checkpoints.glob(".*.tmp"), *run.checkpoints.glob(".step_*.old")]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a safetensors file of tensors on the CPU, synced; return its size and hash.

    The writer of safetensors gives the same bytes, but its errors lack the number that distinguishes a full disk from a
    broken one, and its file would have to be read again for the hash.
    """
    digest, size = hashlib.sha256(), 0

    def hashed() -> Iterator[bytes | memoryview]:
        nonlocal size
        for piece in _pieces(tensors):
            digest.update(piece)
            size += len(piece)
            yield piece

    write_synced(path, hashed())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that all are aligned
    header, end = {}, 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        data = tensors[name].contiguous().flatten().view(torch.uint8).numpy().data
        for start in range(0, len(data), PIECE):
            yield data[start : start + PIECE]


def load(folder: Path, names: Sequence[str]) -> tuple[Parts, Any]:
    """Return the named parts and the state; refuse a folder that is not as it was written."""
    damaged = find_damage(folder, [*(f"{name}.safetensors" for name in names), "state.json"])
    if damaged is not None:
        raise UserError(
            f"checkpoint {folder} is damaged at {damaged}; delete that directory to resume from an older one"
        )
    return {name: read_tensors(folder / f"{name}.safetensors") for name in names}, read_json(folder / "state.json")


def _state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Mapping[str, Tensor]:
    state: Mapping[str, Tensor] = optimizer.state.get(parameter, {})
    return state


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_of: StateOf = _state_of
) -> dict[str, Tensor]:
    """Return the optimizer's state by parameter name, so that it does not depend on an order."""
    return {
        f"{name}.{field}": value
        for name, parameter in model.named_parameters()
        for field, value in state_of(optimizer, parameter).items()
    }


def load_optimizer(model: nn.Module, optimizer: torch.optim.AdamW, tensors: Mapping[str, Tensor], path: object) -> None:
    """Load an optimizer's state; refuse one that does not fit, since the fused kernel would read past its end.

    A parameter that was never updated has no state; of any other all of it must be there.
    """
    updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    known = {full.rpartition(".")[0] for full in tensors}
    parameters = {name: p for name, p in model.named_parameters() if p in updated and name in known}
    count = torch.zeros(())
    expected = {
        f"{name}.{field}": reference
        for name, parameter in parameters.items()
        for field, reference in (("step", count), ("exp_avg", parameter), ("exp_avg_sq", parameter))
    }
    fit_tensors(expected, tensors, path)
    optimizer.state.clear()
    for full, reference in expected.items():
        name, _, field = full.rpartition(".")
        parameter = parameters[name]
        # step counts are on the device of the parameter, where the fused kernel reads them
        optimizer.state[parameter][field] = tensors[full].to(parameter.device, reference.dtype)


MANIFEST = "manifest.json"


class Newest(NamedTuple):
    """The newest complete checkpoint of a run."""

    step: int | None  # None: there is none
    damaged: dict[int, str]  # newer ones, and the file at which each is damaged


def describe_file(path: Path) -> dict[str, Any]:
    """Return the size and the SHA-256 of a file; 0.6 s for each GiB on one core with SHA instructions."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def find_damage(folder: Path, names: Sequence[str]) -> str | None:
    """Return the first of these files that is not what the manifest says; None if all are."""
    try:
        manifest = read_json(folder / MANIFEST)
    except UserError:
        return MANIFEST
    for name in names:
        try:
            if not isinstance(manifest, dict) or describe_file(folder / name) != manifest.get(name):
                return name
        except OSError:
            return name
    return None


def find_newest(run: Run, names: Sequence[str], before: int | None = None) -> Newest:
    """Return the newest checkpoint (of those before a step) in which these files are undamaged."""
    damaged: dict[int, str] = {}
    for step in reversed([step for step in run.steps() if before is None or step < before]):
        name = find_damage(run.checkpoints / f"step_{step}", names)
        if name is None:
            return Newest(step, damaged)
        damaged[step] = name
    return Newest(None, damaged)
