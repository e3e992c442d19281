"""Checkpoints: written beside, synced, renamed; the newest few kept; resumed exactly. safetensors and JSON only.

checkpoints/step_N/{student, teacher, optimizer, centers}.safetensors + state.json + manifest.json (sizes and SHA-256 of
the others, written last), and checkpoints/latest, a link to the newest. Whatever moment a process is killed at, what
bears the name step_N is whole; names that begin with a dot are what it left behind, and the next start removes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adclr import distributed, manifest
from adclr.config import UserError
from adclr.method import ADCLR
from adclr.runs import Run, read_json, sync, write_json, write_synced
from adclr.sharding import state_of
from adclr.weights import fit, read_tensors

Parts = dict[str, dict[str, Tensor]]
NAMES = [f"{name}.safetensors" for name in ("student", "teacher", "centers", "optimizer")] + ["state.json"]
PIECE = 2**24  # bytes written at a time; between two of them other threads have Python's lock
_TYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.int64: "I64"}


@dataclass(frozen=True)
class State:
    """What else a resumed run must know."""

    step: int  # steps done
    steps_per_epoch: int
    fingerprint: str  # of the collection
    meter: dict[str, Any]  # what has been metered since the last line of metrics.jsonl
    processes: int
    micro_batch_size: int


def parts(method: ADCLR, optimizer: torch.optim.Optimizer) -> Parts:
    """All tensors of a checkpoint, where they lie."""
    return {
        "student": method.student.state_dict(),
        "teacher": method.teacher.state_dict(),
        "centers": method.centers.state_dict(),
        "optimizer": _optimizer_state(method.student, optimizer),
    }


def write(run: Run, state: State, tensors: Parts, keep: int) -> Path:
    """Writes a checkpoint, makes it the latest, and only then deletes the ones that are too many."""
    temporary = run.checkpoints / f".step_{state.step}.tmp"
    try:
        _fill(temporary, state, tensors)
        final = _publish(run, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    free(run, keep)
    return final


def _fill(folder: Path, state: State, tensors: Parts) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    told = {f"{name}.safetensors": _write(folder / f"{name}.safetensors", part) for name, part in tensors.items()}
    write_json(folder / "state.json", vars(state))
    told["state.json"] = manifest.facts(folder / "state.json")
    write_json(folder / manifest.NAME, told)  # and syncs the folder


def _publish(run: Run, folder: Path) -> Path:
    """Gives a whole checkpoint its name, and makes it the latest."""
    final, latest = run.checkpoints / folder.name[1:].removesuffix(".tmp"), run.checkpoints / "latest"
    if final.exists():  # of a run that was copied, or set back: a whole one is resumed from, not made again
        _remove(final)
    os.rename(folder, final)
    sync(run.checkpoints)
    link = run.checkpoints / ".latest.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    if latest.is_dir() and not latest.is_symlink():  # a copy that followed links made a directory of it
        shutil.rmtree(latest)
    os.replace(link, latest)
    sync(run.checkpoints)
    return final


def free(run: Run, keep: int) -> int:
    """Deletes all but the newest few; how many. One that cannot be deleted stays, which harms nothing."""
    freed = 0
    for old in run.steps()[:-keep]:
        with suppress(OSError):
            _remove(run.checkpoints / f"step_{old}")
            freed += 1
    return freed


def _remove(folder: Path) -> None:
    """At no moment does half of a checkpoint bear the name of a whole one."""
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def tidy(run: Run) -> None:
    """Removes what a process that was killed left behind; only who holds the lock of the run may."""
    for path in [*run.path.glob(".*.tmp"), *run.checkpoints.glob(".*.tmp"), *run.checkpoints.glob(".step_*.old")]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def load_before(step: int, run: Run, method: ADCLR, optimizer: torch.optim.Optimizer) -> State | None:
    """Restores the newest whole checkpoint in which a step is not done yet, and changes nothing on the disk."""
    found = manifest.newest(run, NAMES, before=step)
    return None if found.step is None else _restore(run.checkpoints / f"step_{found.step}", method, optimizer)


def load(run: Run, method: ADCLR, optimizer: torch.optim.Optimizer) -> State | None:
    """Restores the newest whole checkpoint and says where it stands; None if there is none.

    The first process looks which that is, and sets newer ones that are damaged aside; all read the same.
    """
    device = next(method.parameters()).device
    found = manifest.newest(run, NAMES) if distributed.is_main() else manifest.Found(None, {})
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
    for bad, name in found.damaged.items():
        _set_aside(run, bad, name, step - 2)
    return _restore(run.checkpoints / f"step_{step - 2}", method, optimizer)


def _set_aside(run: Run, step: int, name: str, going_on_from: int) -> None:
    """A damaged checkpoint must not be counted among those that are kept."""
    folder = run.checkpoints / f"step_{step}"
    aside = folder.with_name(f"{folder.name}.damaged")
    try:
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


def _restore(folder: Path, method: ADCLR, optimizer: torch.optim.Optimizer) -> State:
    wanted = parts(method, optimizer)
    for name, module in (
        ("student", method.student),
        ("teacher", method.teacher),
        ("centers", method.centers),
    ):
        tensors = read_tensors(folder / f"{name}.safetensors")
        fit(wanted[name], tensors, folder / f"{name}.safetensors")
        module.load_state_dict(tensors)
    _load_optimizer(method.student, optimizer, read_tensors(folder / "optimizer.safetensors"))
    try:
        return State(**read_json(folder / "state.json"))
    except TypeError:
        raise UserError(f"{folder} is of another version of adclr; start the run anew in another --out") from None


def _optimizer_state(student: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by parameter name, so that it does not hang on an order."""
    return {
        f"{name}.{what}": value
        for name, parameter in student.named_parameters()
        for what, value in state_of(optimizer, parameter).items()
    }


def _load_optimizer(student: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(student.named_parameters())
    optimizer.state.clear()
    for full, value in tensors.items():
        name, _, what = full.rpartition(".")
        parameter = parameters[name]
        # step counts lie where the fused kernel wants them, with the parameter
        optimizer.state[parameter][what] = value.to(parameter.device)


def _write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """A safetensors file of tensors on the CPU, synced; its size and hash, taken on the way.

    safetensors' own writer makes the same bytes, but its errors have lost their number, by which a full disk is told
    from a broken one, and what it wrote would have to be read again for the hash.
    """
    digest, size = hashlib.sha256(), 0

    def noted() -> Iterator[bytes | memoryview]:
        nonlocal size
        for piece in _pieces(tensors):
            digest.update(piece)
            size += len(piece)
            yield piece

    write_synced(path, noted())
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
