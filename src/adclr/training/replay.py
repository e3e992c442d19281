"""`adclr pretrain --replay STEP`: does one step of a run again and finds out what in it is not finite.

Training goes on in memory from the newest checkpoint before the step, exactly as it went, and stops there. Then: is the
step void here too, which images alone make it so, which operation makes the first number that is not finite, and would
float32 have done? Nothing of the run is changed; RUN/replay/step_N.json is written.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import adclr
from adclr.config.sections import UserError
from adclr.data.augment import Views
from adclr.model.method import ADCLR
from adclr.system import machine
from adclr.system.devices import choose
from adclr.system.files import write_json
from adclr.system.progress import track
from adclr.training.job import Job, assemble, batches_of, order, seeded, views_of
from adclr.training.launch import Launch
from adclr.training.meter import NAMES
from adclr.training.schedules import Values
from adclr.training.speed import prepare, ready, repeatable
from adclr.training.step import Step

MOST_IMAGES = 8  # that are named
Indices = NDArray[np.int64]


def run(launched: Launch, step: int) -> dict[str, Any]:
    """What was found of a step, which is counted from 1 as in metrics.jsonl; printed and written too."""
    # to decode all images for a few steps would take longer than the steps
    data = launched.settings.data.model_copy(update={"cache": "off"})
    settings = launched.settings.model_copy(update={"data": data})
    launched, device = replace(launched, settings=settings), choose(settings.train.device)
    steps = settings.train.epochs * (len(launched.source) // settings.train.batch_size)
    if not launched.run.begun:
        raise UserError(f"{launched.run.path} holds no run of which a step could be replayed; give --out of one")
    if step > steps:
        raise UserError(f"{launched.run.path} has only {steps} steps; --replay takes one of them")
    if machine.num_processes() > 1:
        raise UserError("--replay works in one process; start it without torchrun")
    with repeatable(settings.train.deterministic):
        job = assemble(launched, device, before=step)
        compiled = prepare(job.method, settings, device, job.dtype, job.micro_batch)
        take = Step(settings, job.method, job.optimizer, device, job.dtype, job.accumulate, ready(compiled))
        start = 0 if job.state is None else job.state.step
        found = _go_to(job, take, start, step) | _look(job, step)
    file = launched.run.path / "replay" / f"step_{step}.json"
    write_json(file, found)
    print(f"{_describe(found)}\nwritten to {file}")
    return found


def _go_to(job: Job, take: Step, start: int, step: int) -> dict[str, Any]:
    """Does the steps before it; whether it is void itself, which leaves all as it is."""
    views = views_of(job, order(job, start))
    try:
        for number in track(range(start, step - 1), f"to step {step}", step - 1 - start):
            take(seeded(job, views, number), job.schedules.at(number))
        state = copy.deepcopy(job.method.state_dict())
        losses, ok = take(seeded(job, views, step - 1), job.schedules.at(step - 1))
        job.method.load_state_dict(state)  # a good step would have moved it
    finally:
        views.close()
    same = job.state is None or job.state.processes == 1
    return {
        "step": step,
        "from_checkpoint": start,
        "drop_path_as_it_was": same or job.settings.model.drop_path == 0,
        "void": not ok.item(),
        "losses": dict(zip(NAMES, _numbers(losses), strict=True)),
    }


def _look(job: Job, step: int) -> dict[str, Any]:
    """What in the step is not finite."""
    for backbone in (job.method.student.backbone, job.method.teacher.backbone):
        backbone.plain_blocks()  # compiled ones would be compiled again for every number of images
    epoch, indices = next(batches_of(job, step - 1))
    values = job.schedules.at(step - 1)

    def bad(some: Indices, dtype: torch.dtype | None = job.dtype) -> bool:
        """Whether images on their own make a loss or gradient that is not finite."""
        for views in _views(job, epoch, some):
            losses = _learn(job.method, views, values, job.device, dtype)
            gradients = [p.grad for p in job.method.student.parameters() if p.grad is not None]
            finite = losses.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)
            job.method.forget()
            if not finite:
                return True
        return False

    culprits = list(_culprits(bad, indices))
    source, looked_at = job.feed.source, np.array(culprits[:1] or indices[: job.micro_batch], np.int64)
    weights = [name for name, p in job.method.named_parameters() if not p.isfinite().all()]
    found: dict[str, Any] = {
        "images": [
            {"path": source.paths[index], "key": f"{source.keys[index]:016x}"} for index in culprits[:MOST_IMAGES]
        ],
        "weights_not_finite": weights,
    }
    if bad(looked_at):
        (views, *_) = _views(job, epoch, looked_at)
        found |= {"input_finite": all(bool(t.isfinite().all()) for t in views.tensors() if t.is_floating_point())}
        found |= {"finite_in_float32": not bad(looked_at, None)}
        found |= _first(job.method, views, values, job.dtype)
    return found


def _culprits(bad: Callable[[Indices], bool], indices: Indices) -> Iterator[int]:
    """The images that are bad on their own, by halving."""
    if not bad(indices):
        return
    if len(indices) == 1:
        yield int(indices[0])
        return
    half = len(indices) // 2
    yield from _culprits(bad, indices[:half])
    yield from _culprits(bad, indices[half:])


def _views(job: Job, epoch: int, indices: Indices) -> Iterator[Views]:
    parts = (indices[i : i + job.micro_batch] for i in range(0, len(indices), job.micro_batch))
    views = views_of(job, ((epoch, part) for part in parts))
    try:
        yield from views
    finally:
        views.close()


def _learn(method: ADCLR, views: Views, values: Values, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        losses = method(views, values.teacher_temperature, values.query_temperature)
    losses.total.backward()
    return torch.stack([loss.detach() for loss in losses])


def _first(method: ADCLR, views: Views, values: Values, dtype: torch.dtype | None) -> dict[str, Any]:
    """The operation that makes the first number that is not finite, on the CPU, where all of them can be watched."""
    copied, cpu = copy.deepcopy(method).cpu(), torch.device("cpu")
    with _Watch() as watch:  # type: ignore[no-untyped-call]
        _learn(copied, views.map(Tensor.cpu), values, cpu, dtype)
    gradients = [n for n, p in copied.student.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    return {"first_operation": watch.first, "gradients_not_finite": gradients}


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first operation that makes numbers that are not finite of numbers that are."""

    first: str | None = None

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        made = function(*arguments, **(named or {}))
        # memory that is not filled yet may hold anything
        if self.first is None and "empty" not in str(function) and not _finite([made]) and _finite(arguments):
            here = str(Path(adclr.__file__).parent)
            frames = [f for f in traceback.extract_stack() if f.filename.startswith(here) and f.filename != __file__]
            place = (
                f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
            )
            self.first = f"{function}{place or ' in the backward pass'}"
        return made


def _finite(things: Iterable[Any]) -> bool:
    for thing in things:
        if isinstance(thing, list | tuple) and not _finite(thing):
            return False
        if isinstance(thing, Tensor) and thing.is_floating_point() and not thing.isfinite().all():
            return False
    return True


def _numbers(values: Tensor) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]


def _describe(found: dict[str, Any]) -> str:
    step = found["step"]
    if not found["void"] and not found["images"]:
        return f"step {step} is good here, its loss {found['losses']['loss']:.4f}"
    lines = [f"step {step} is {'void' if found['void'] else 'good as a whole, but not of some images alone'}"]
    if found["weights_not_finite"]:
        lines.append(f"the weights are not finite already: {', '.join(found['weights_not_finite'][:3])}")
    lines += [f"image {image['path']}" for image in found["images"]] or ["no image makes it so alone"]
    if "first_operation" in found:
        lines.append(f"first made by {found['first_operation'] or 'something that happens on the GPU only'}")
        if not found["input_finite"]:
            lines.append("the views themselves are not finite: look at the images and at data.mean and data.std")
        if found["finite_in_float32"]:
            lines.append("in float32 it is finite: train.precision=float32 would do, in another --out")
    return "\n".join(lines)
