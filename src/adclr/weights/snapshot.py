"""A folder of tensors and a few numbers that is there whole or not at all: safetensors and JSON, nothing pickled.

RUN/checkpoints/step_N/{PART.safetensors, ...} + state.json + manifest.json (sizes and SHA-256 of the others, written
last), and checkpoints/latest, a link to the newest. Whatever moment a process is killed at, what bears the name step_N
is whole; names that begin with a dot are what it left behind, and the next start removes them.
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

from adclr.config.sections import UserError
from adclr.system.files import read_json, sync, write_json, write_synced
from adclr.system.runs import Run
from adclr.weights.tensors import fit_tensors, read_tensors

Parts = dict[str, dict[str, Tensor]]
StateOf = Callable[[torch.optim.Optimizer, nn.Parameter], Mapping[str, Tensor]]
PIECE = 2**24  # bytes written at a time; between two of them other threads have Python's lock
_TYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.int64: "I64"}


def save(run: Run, step: int, parts: Parts, state: Mapping[str, Any], keep: int) -> Path:
    """Writes tensors from where they lie; a disk that does not take them is the user's to mend."""
    here = {part: {name: tensor.detach().cpu() for name, tensor in named.items()} for part, named in parts.items()}
    try:
        return write(run, step, here, state, keep)
    except OSError as error:
        raise UserError(
            f"the checkpoint of step {step} cannot be written to {run.checkpoints} ({error.strerror or error}); "
            "make room there, and the same command goes on from the checkpoint before"
        ) from None


def write(run: Run, step: int, tensors: Parts, state: Mapping[str, Any], keep: int) -> Path:
    """Writes tensors on the CPU, makes that the latest, and only then deletes the checkpoints that are too many."""
    temporary = run.checkpoints / f".step_{step}.tmp"
    try:
        _fill(temporary, state, tensors)
        final = _publish(run, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    free(run, keep)
    return final


def _fill(folder: Path, state: Mapping[str, Any], tensors: Parts) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    told = {f"{name}.safetensors": _write(folder / f"{name}.safetensors", part) for name, part in tensors.items()}
    write_json(folder / "state.json", dict(state))
    told["state.json"] = facts(folder / "state.json")
    write_json(folder / MANIFEST, told)  # and syncs the folder


def _publish(run: Run, folder: Path) -> Path:
    """Gives a whole checkpoint its name, and makes it the latest."""
    final = run.checkpoints / folder.name[1:].removesuffix(".tmp")
    if final.exists():  # of a run that was copied, or set back: a whole one is resumed from, not made again
        _remove(final)
    if not run.steps():
        sync(run.path)  # that there are checkpoints
    os.rename(folder, final)
    sync(run.checkpoints)
    point(run, final.name)
    return final


def point(run: Run, name: str) -> None:
    """Makes a checkpoint the latest."""
    link, latest = run.checkpoints / ".latest.tmp", run.checkpoints / "latest"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    if latest.is_dir() and not latest.is_symlink():  # a copy that followed links made a directory of it
        shutil.rmtree(latest)
    os.replace(link, latest)
    sync(run.checkpoints)


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


def load(folder: Path, names: Sequence[str]) -> tuple[Parts, Any]:
    """The named parts and the state; refuses a folder that is not as it was written."""
    damaged = damage(folder, [*(f"{name}.safetensors" for name in names), "state.json"])
    if damaged is not None:
        raise UserError(
            f"checkpoint {folder} is damaged at {damaged}; delete that directory to go on from an older one"
        )
    return {name: read_tensors(folder / f"{name}.safetensors") for name in names}, read_json(folder / "state.json")


def _own_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Mapping[str, Tensor]:
    found: Mapping[str, Tensor] = optimizer.state.get(parameter, {})
    return found


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_of: StateOf = _own_state
) -> dict[str, Tensor]:
    """The optimizer's state by parameter name, so that it does not hang on an order."""
    return {
        f"{name}.{what}": value
        for name, parameter in model.named_parameters()
        for what, value in state_of(optimizer, parameter).items()
    }


def load_optimizer(model: nn.Module, optimizer: torch.optim.AdamW, tensors: Mapping[str, Tensor], path: object) -> None:
    """Refuses what does not fit: the fused kernel asks no moment for its size, and would read past its end.

    A parameter that was never updated has no state; of any other all of it must be there.
    """
    updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    known = {full.rpartition(".")[0] for full in tensors}
    parameters = {name: p for name, p in model.named_parameters() if p in updated and name in known}
    count = torch.zeros(())
    wanted = {
        f"{name}.{what}": like
        for name, parameter in parameters.items()
        for what, like in (("step", count), ("exp_avg", parameter), ("exp_avg_sq", parameter))
    }
    fit_tensors(wanted, tensors, path)
    optimizer.state.clear()
    for full, like in wanted.items():
        name, _, what = full.rpartition(".")
        parameter = parameters[name]
        # step counts lie where the fused kernel wants them, with the parameter
        optimizer.state[parameter][what] = tensors[full].to(parameter.device, like.dtype)


MANIFEST = "manifest.json"


class Found(NamedTuple):
    step: int | None  # of the newest whole checkpoint
    damaged: dict[int, str]  # newer ones, and where each is damaged


def facts(path: Path) -> dict[str, Any]:
    """0.6 s for each GiB on one core that knows SHA-256."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def damage(folder: Path, names: Sequence[str]) -> str | None:
    """The first of these files that is not what the manifest says."""
    try:
        told = read_json(folder / MANIFEST)
    except UserError:
        return MANIFEST
    for name in names:
        try:
            if not isinstance(told, dict) or facts(folder / name) != told.get(name):
                return name
        except OSError:
            return name
    return None


def newest(run: Run, names: Sequence[str], before: int | None = None) -> Found:
    """The newest checkpoint (of those before a step) in which these files are whole."""
    damaged: dict[int, str] = {}
    for step in reversed([step for step in run.steps() if before is None or step < before]):
        name = damage(run.checkpoints / f"step_{step}", names)
        if name is None:
            return Found(step, damaged)
        damaged[step] = name
    return Found(None, damaged)
