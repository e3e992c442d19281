"""`adclr pretrain --replay STEP`: repeat one step of a run and find what in it is not finite.

Training is repeated in memory from the newest checkpoint before the step, exactly as it was, up to that step. Then: is
the step void here too, which images alone make it so, which operation gives the first number that is not finite, and is
it finite in float32? Nothing of the run is changed; RUN/replay/step_N.json is written.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import adclr
from adclr.config.parsing import UserError
from adclr.model.named_tensors import Views
from adclr.system import machine
from adclr.system.devices import deterministic, select_device
from adclr.system.files import write_json
from adclr.system.progress import track
from adclr.system.text import printable
from adclr.training.job import Job, compile_method, load_job
from adclr.training.launch import Launch
from adclr.training.methods import Method, vits
from adclr.training.schedules import Values
from adclr.training.step import Step

MAX_IMAGES = 8  # that are named
Indices = NDArray[np.int64]


def replay_step(launched: Launch, step: int) -> dict[str, Any]:
    """Return, print and write what is not finite in a step, which is counted from 1 as in metrics.jsonl."""
    # to decode all images for a few steps would take longer than the steps
    data = launched.settings.data.model_copy(update={"cache": "off"})
    settings = launched.settings.model_copy(update={"data": data})
    launched, device = replace(launched, settings=settings), select_device(settings.train.device)
    steps = settings.train.epochs * (len(launched.source) // settings.train.batch_size)
    if not launched.run.begun:
        raise UserError(f"{launched.run.path} holds no run of which a step could be replayed; give --out of one")
    if step > steps:
        raise UserError(f"{launched.run.path} has only {steps} steps; --replay takes one of them")
    if machine.num_processes() > 1:
        raise UserError("--replay works in one process; start it without torchrun")
    with deterministic(settings.train.deterministic):
        job = load_job(launched, device, before=step)
        compile_method(job.method, settings, device, job.dtype, job.micro_batch, steps)
        take_step = Step(settings, job.method, job.optimizer, device, job.dtype, job.accumulate)
        result = _repeat_to(job, take_step, step) | _diagnose(job, step)
    file = launched.run.path / "replay" / f"step_{step}.json"
    write_json(file, result)
    print(f"{_describe(result)}\nwritten to {printable(str(file))}")
    return result


def _repeat_to(job: Job, take_step: Step, step: int) -> dict[str, Any]:
    """Take the steps before one and that one itself; return whether it is void, and leave the method as before it."""
    start = job.start
    with closing(job.batches.from_step(start)) as views:
        for number in track(range(start, step - 1), f"to step {step}", step - 1 - start):
            take_step(job.batches.step_views(views, number), job.schedules.at(number))
        state = copy.deepcopy(job.method.state_dict())
        losses, ok = take_step(job.batches.step_views(views, step - 1), job.schedules.at(step - 1))
        job.method.load_state_dict(state)  # a good step has changed it
    same = job.state is None or job.state.processes == 1
    return {
        "step": step,
        "from_checkpoint": start,
        "drop_path_as_it_was": same or job.settings.model.drop_path == 0,
        "void": not ok.item(),
        "losses": dict(zip(job.meter.names, _finite_or_none(losses), strict=True)),
    }


def _diagnose(job: Job, step: int) -> dict[str, Any]:
    """Return the images, weights and operation that are not finite in a step."""
    for backbone in vits(job.method):
        backbone.plain_blocks()  # compiled ones would be compiled again for every number of images
    epoch, indices = job.batches.step_indices(step - 1)
    values = job.schedules.at(step - 1)

    def is_bad(images: Indices, dtype: torch.dtype | None = job.dtype) -> bool:
        """Return whether images on their own give a loss or gradient that is not finite."""
        for views in _views(job, epoch, images):
            losses = _backward(job.method, views, values, job.device, dtype)
            gradients = [p.grad for p in job.method.student.parameters() if p.grad is not None]
            finite = losses.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)
            job.method.forget()
            if not finite:
                return True
        return False

    bad_images = list(_find_bad(is_bad, indices))
    source, examined = job.feed.source, np.array(bad_images[:1] or indices[: job.micro_batch], np.int64)
    weights = [name for name, p in job.method.named_parameters() if not p.isfinite().all()]
    result: dict[str, Any] = {
        "images": [
            {"path": source.paths[index], "key": f"{source.keys[index]:016x}"} for index in bad_images[:MAX_IMAGES]
        ],
        "weights_not_finite": weights,
    }
    if is_bad(examined):
        (views, *_) = _views(job, epoch, examined)
        result["input_finite"] = all(bool(t.isfinite().all()) for t in views.tensors() if t.is_floating_point())
        result["finite_in_float32"] = not is_bad(examined, None)
        result |= _first_operation(job.method, views, values, job.dtype)
    return result


def _find_bad(is_bad: Callable[[Indices], bool], indices: Indices) -> Iterator[int]:
    """Yield the images that are bad on their own, by halving."""
    if not is_bad(indices):
        return
    if len(indices) == 1:
        yield int(indices[0])
        return
    half = len(indices) // 2
    yield from _find_bad(is_bad, indices[:half])
    yield from _find_bad(is_bad, indices[half:])


def _views(job: Job, epoch: int, indices: Indices) -> Iterator[Views]:
    parts = (indices[i : i + job.micro_batch] for i in range(0, len(indices), job.micro_batch))
    with closing(job.batches.prefetch((epoch, part) for part in parts)) as views:
        yield from views


def _backward(method: Method, views: Views, values: Values, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """Run forward and backward; return the losses."""
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        losses = method(views, values.teacher_temperature, values.query_temperature)
    losses.total.backward()
    return torch.stack([loss.detach() for loss in losses])


def _first_operation(method: Method, views: Views, values: Values, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the first operation whose result is not finite, on the CPU, where every operation can be checked."""
    copied, cpu = copy.deepcopy(method).cpu(), torch.device("cpu")
    with _FiniteCheck() as check:  # type: ignore[no-untyped-call]
        _backward(copied, views.map(Tensor.cpu), values, cpu, dtype)
    gradients = [n for n, p in copied.student.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    return {"first_operation": check.first, "gradients_not_finite": gradients}


class _FiniteCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stores the first operation that gives numbers that are not finite from numbers that are."""

    first: str | None = None

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        # uninitialized memory may hold anything
        if self.first is None and "empty" not in str(function) and not _finite([result]) and _finite(arguments):
            source = str(Path(adclr.__file__).parent)
            frames = [f for f in traceback.extract_stack() if f.filename.startswith(source) and f.filename != __file__]
            line = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
            self.first = f"{function}{line or ' in the backward pass'}"
        return result


def _finite(values: Iterable[Any]) -> bool:
    """Return whether all tensors among values, also in nested lists, are finite."""
    for value in values:
        if isinstance(value, list | tuple) and not _finite(value):
            return False
        if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
            return False
    return True


def _finite_or_none(values: Tensor) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]


def _describe(result: dict[str, Any]) -> str:
    """Return the result as lines of text."""
    step = result["step"]
    if not result["void"] and not result["images"]:
        return f"step {step} is finite here, its loss is {result['losses']['loss']:.4f}"
    lines = [f"step {step} is {'void' if result['void'] else 'finite as a whole, but not for some images alone'}"]
    if result["weights_not_finite"]:
        lines.append(f"the weights are not finite already: {', '.join(result['weights_not_finite'][:3])}")
    lines += [f"image {image['path']}" for image in result["images"]] or ["no single image causes it"]
    if "first_operation" in result:
        lines.append(f"first made by {result['first_operation'] or 'something that happens on the GPU only'}")
        if not result["input_finite"]:
            lines.append("the views themselves are not finite: look at the images and at data.mean and data.std")
        if result["finite_in_float32"]:
            lines.append("in float32 it is finite: train.precision=float32 would do, in another --out")
    return "\n".join(lines)
