"""A training of an evaluation: steps with AdamW, a learning rate by step, checkpoints, and the way back to them.

With a place to write to it is resumed there: PLACE/metrics.jsonl and PLACE/checkpoints while it runs.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from pydantic import Field
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adclr.config.sections import Count, NonNegative, Positive, Section, Share, UserError, setting
from adclr.data.draws import combine
from adclr.system import distributed, outputs
from adclr.system.files import write_atomically, write_json
from adclr.system.progress import Line
from adclr.system.runs import Run
from adclr.weights import snapshot
from adclr.weights.tensors import fit_tensors

LOG_EVERY = 20  # steps between lines of metrics.jsonl, and between looks at the loss


class Pace(Section):
    """How long and how fast; what is null is the protocol's."""

    steps: Count | None = Field(None, description="of training; null: the protocol's")
    batch_size: Count | None = Field(None, description="images of a step, of all processes; null: the protocol's")
    lr: Positive | None = Field(None, description="at its highest; null: the protocol's")
    warmup_steps: int | None = Field(
        None, ge=0, description="linear from 0; null: the protocol's, at most a tenth of the steps"
    )
    weight_decay: NonNegative | None = Field(None, description="not of biases, norms, tokens and positions")
    layer_decay: Share | None = Field(None, description="speed of a layer, of the one above; from scratch 1")
    clip_norm: Positive | None = Field(None, description="largest norm of the gradient of all parameters")
    minutes: Positive | None = Field(
        None, description="end the training, and its schedule, after this time at the latest; then it is not repeatable"
    )
    checkpoint_minutes: Positive = setting(5.0, "between checkpoints", free=["resume", "study"])


Losses = Callable[[nn.Module, Any], dict[str, Tensor]]


class Batches(Protocol):
    def __next__(self) -> Any: ...
    def close(self) -> None: ...


@dataclass
class Course:
    name: str
    model: nn.Module
    optimizer: torch.optim.AdamW
    batches: Callable[[int, int], Batches]  # of steps from the first to before the second
    losses: Losses  # of the model, perhaps wrapped, and what a step is shown; they are added up
    lr_at: Callable[[float, int], float]  # (share of the course that is done, step) -> learning rate
    total: int
    seed: int
    device: torch.device
    clip_norm: float | None
    minutes: float | None
    checkpoint_minutes: float
    run: Run | None
    identity: dict[str, Any]  # what a checkpoint must be of
    seconds: float = 0.0  # of earlier starts

    def progress(self, step: int, started: float) -> float:
        share = step / self.total
        if self.minutes is None:
            return share
        return max(share, (self.seconds + time.monotonic() - started) / (60 * self.minutes))


def train(course: Course) -> int:
    """Trains to the end, from the last checkpoint if there is one; the number of steps."""
    if course.minutes is not None and distributed.world_size() > 1:
        raise UserError("minutes= needs one process, for several would not stop at the same step; set steps instead")
    start = resume(course)
    model: nn.Module = course.model.train()
    if distributed.world_size() > 1 and start < course.total:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    sums: dict[str, Tensor] = {}
    started = saved = time.monotonic()
    step, text, noted = start, "", start
    batches = course.batches(start, course.total)
    try:
        with Line(course.name, course.total, start, distributed.is_main()) as line:
            while step < course.total and (share := course.progress(step, started)) < 1:
                lr = course.lr_at(share, step)
                for name, value in _step(course, model, next(batches), step, lr).items():
                    sums[name] = sums[name] + value if name in sums else value
                step += 1
                if step % LOG_EVERY == 0 or step == course.total:
                    means = {name: value / (step - noted) for name, value in sums.items()}
                    text = _note(course, step, means, lr, time.monotonic() - started)
                    sums, noted = {}, step
                line.move(step, text)
                if course.run is not None and time.monotonic() - saved > 60 * course.checkpoint_minutes:
                    _save(course, step, course.seconds + time.monotonic() - started)
                    saved = time.monotonic()
    finally:
        batches.close()
    if course.run is not None and step > start:
        _save(course, step, math.inf)
    course.model.eval()
    return step


def _step(course: Course, model: nn.Module, seen: Any, step: int, lr: float) -> dict[str, Tensor]:
    torch.manual_seed(combine(course.seed, step, distributed.rank()) % 2**63)  # of dropout, and what else draws
    losses = course.losses(model, seen)
    loss = torch.stack(list(losses.values())).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    if course.clip_norm is not None:
        nn.utils.clip_grad_norm_(course.model.parameters(), course.clip_norm)
    for group in course.optimizer.param_groups:
        group["lr"] = lr * group["scale"]
    course.optimizer.step()
    course.optimizer.zero_grad(set_to_none=True)
    return {"loss": loss.detach()} | {name: value.detach() for name, value in losses.items()}


def _note(course: Course, step: int, means: dict[str, Tensor], lr: float, seconds: float) -> str:
    """Writes the means since the last time; refuses to go on with numbers that are none."""
    numbers = distributed.sum_(torch.stack(list(means.values())).float()) / distributed.world_size()
    row = dict(zip(means, numbers.tolist(), strict=True))
    if not math.isfinite(row["loss"]):
        raise UserError(f"the loss is no number any more at step {step}; set a lower lr, or clip_norm=1")
    if course.run is not None and distributed.is_main():
        course.run.append("metrics.jsonl", {"step": step, "seconds": round(seconds, 2), "lr": lr} | row)
    return f"loss {row['loss']:.3f}"


# -- from one start to the next --


def locked(run: Run | None) -> Any:
    """Of several programs one works at a place."""
    return run.lock(outputs.words("evaluate")) if run is not None and distributed.is_main() else nullcontext()


def _parts(course: Course) -> snapshot.Parts:
    return {
        "model": course.model.state_dict(),
        "optimizer": snapshot.optimizer_state(course.model, course.optimizer),
    }


def _save(course: Course, step: int, seconds: float) -> None:
    """`seconds` without end: the course is over, however many steps it was to have."""
    if course.run is not None and distributed.is_main():
        state = {"step": step, "seconds": min(seconds, 1e12), "identity": course.identity}
        snapshot.save(course.run, step, _parts(course), state, keep=1)


def resume(course: Course) -> int:
    """Restores the latest checkpoint; the number of steps that are done."""
    if course.run is None:
        return 0
    steps = course.run.steps()
    if not steps:
        distributed.barrier()  # until all have looked
        if distributed.is_main():
            course.run.cut("metrics.jsonl", -1)
        return 0
    folder, parts = course.run.checkpoints / f"step_{steps[-1]}", _parts(course)
    stored, state = snapshot.load(folder, list(parts))
    if not isinstance(state, dict) or state.get("identity") != course.identity:
        raise UserError(
            f"{course.run.path} holds a training of other weights, images or settings; "
            "delete it or choose another --out"
        )
    fit_tensors(parts["model"], stored["model"], folder / "model.safetensors")
    course.model.load_state_dict(stored["model"])
    snapshot.load_optimizer(course.model, course.optimizer, stored["optimizer"], folder / "optimizer.safetensors")
    for (
        parameter,
        state_of,
    ) in course.optimizer.state.items():  # the fused kernel wants them to lie as the parameter does
        for what, value in state_of.items():
            if value.shape == parameter.shape:
                state_of[what] = torch.empty_like(parameter).copy_(value)
    if not isinstance(state.get("seconds"), float):
        raise UserError(f"{folder}/state.json does not say how long it took; delete that directory to start anew")
    course.seconds = state["seconds"]
    distributed.barrier()
    if distributed.is_main():
        course.run.cut("metrics.jsonl", steps[-1])
        print(f"going on from step {steps[-1]} of {course.total}", file=sys.stderr)
    return steps[-1]


def finish(course: Course, facts: dict[str, Any]) -> None:
    """Leaves the trained model where the checkpoints were."""
    if course.run is None or not distributed.is_main():
        return
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in course.model.state_dict().items()}
    write_json(course.run.path / "model.json", facts)
    write_atomically(course.run.path / "model.safetensors", save(tensors))
    shutil.rmtree(course.run.checkpoints, ignore_errors=True)
