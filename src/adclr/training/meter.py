"""Losses and void steps since the last line of metrics.jsonl, summed on the device so that the host does not wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from adclr.system import distributed

# the order of `method.Losses`, and of `distillation.DistillationLosses`
LOSS_NAMES = ("loss", "loss_global", "loss_query", "loss_masked", "loss_neighbor", "teacher_entropy")
DISTILLATION_NAMES = ("loss", "loss_cls", "loss_patches", "cosine_cls", "cosine_patches")
ADDED = LOSS_NAMES.index("loss_neighbor")  # after version 0.1: its checkpoints have numbers for the others
Step = Annotated[int, Field(strict=True, ge=1)]
Number = Annotated[float, Field(strict=True)]
Loss = Number | None


class _State(BaseModel, extra="forbid"):
    """The state of a meter in a checkpoint, as `Meter.decoder` returns it."""

    # by the meter's names, and good and void steps
    sums: Annotated[list[Number], Field(min_length=len(DISTILLATION_NAMES) + 2, max_length=len(LOSS_NAMES) + 2)]
    void: list[tuple[Step, Loss, Loss, Loss, Loss, Loss] | tuple[Step, Loss, Loss, Loss, Loss, Loss, Loss]]
    last_void: Annotated[int, Field(strict=True, ge=0)] = 0  # missing in the first checkpoints of 0.1


def check_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return a meter's state as it is; raise pydantic's error if it is not one."""
    _State.model_validate(state)
    if any(len(row) != len(state["sums"]) - 1 for row in state["void"]):
        raise ValueError("void: rows of another number of losses than the sums")
    return state


def _with_neighbor_loss(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a meter of version 0.1, which has a loss less, with all of today's."""
    sums = [*state["sums"][:ADDED], 0.0, *state["sums"][ADDED:]]
    return state | {"sums": sums, "void": [[*row[: 1 + ADDED], 0.0, *row[1 + ADDED :]] for row in state["void"]]}


class Void(NamedTuple):
    """A step without effect, because its loss or a gradient was not finite."""

    step: int  # counted from 1
    losses: list[float | None]  # by `Meter.names`, None where not finite; if none is None, a gradient was not finite


class Reading(NamedTuple):
    """The content of a meter since it was last read."""

    means: dict[str, float | None]  # over good steps and processes, None if there were none; and `voided_steps`
    void: list[Void]
    last_void: int  # steps in a row, up to the last one


class Meter:
    """`meter.add(done, losses, ok)` after every step; `meter.read()` after at most `every` of them."""

    def __init__(self, device: torch.device, every: int, names: tuple[str, ...] = LOSS_NAMES) -> None:
        self.names = names
        dtype = torch.float32 if device.type == "mps" else torch.float64  # which a Mac's GPU has not
        self.sums = torch.zeros(len(names) + 2, dtype=dtype, device=device)  # + good steps, voided steps
        # the losses of each step, and whether it was good
        self.rows = torch.zeros(every, len(names) + 1, device=device)
        self.count = 0  # rows in use
        self.done = 0  # steps
        self.void: list[Void] = []  # before the first row, of a resumed run
        self.last_void = 0

    def add(self, done: int, losses: Tensor, ok: Tensor) -> None:
        """Add the losses of a step, and whether it was good."""
        dtype = self.sums.dtype
        row = torch.cat([losses.to(dtype), losses.new_ones(1, dtype=dtype)])
        self.sums[:-1] += torch.where(ok, row, 0.0)
        self.sums[-1] += (~ok).to(dtype)
        torch.cat([losses, ok.to(losses.dtype).view(1)], out=self.rows[self.count])
        self.count, self.done = self.count + 1, done

    def total(self) -> Tensor:
        """Return all numbers summed over the processes, on the device; all processes must call it."""
        return distributed.all_reduce_sum(torch.cat([self.sums, self.rows[: self.count].flatten().to(self.sums.dtype)]))

    def decoder(self) -> Callable[[Tensor], dict[str, Any]]:
        """Return a function that makes a checkpoint's state of `total`; the meter may change before it is called."""
        done, before, world_size, last_void = self.done, list(self.void), distributed.world_size(), self.last_void
        count = len(self.names)

        def decode(total: Tensor) -> dict[str, Any]:
            numbers: list[float] = (total / world_size).tolist()
            rows = _rows(numbers[count + 2 :], count)
            void = [*before, *_void(rows, done)]
            return {
                "sums": numbers[: count + 2],
                "void": [[v.step, *v.losses] for v in void],
                "last_void": _count_last_void(last_void, rows),
            }

        return decode

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the state in a checkpoint."""
        if self.names == LOSS_NAMES and len(state["sums"]) == len(LOSS_NAMES) + 1:
            state = _with_neighbor_loss(state)
        self.sums.copy_(torch.tensor(state["sums"], dtype=torch.float64))
        self.void = [Void(int(row[0]), list(row[1:])) for row in state["void"]]
        self.last_void = state.get("last_void", 0)

    def read(self) -> Reading:
        """Return everything since the last call and reset; waits for the device."""
        numbers: list[float] = (self.total() / distributed.world_size()).tolist()
        count = len(self.names)
        *sums, good, voided = numbers[: count + 2]
        rows = _rows(numbers[count + 2 :], count)
        void = [*self.void, *_void(rows, self.done)]
        self.last_void = _count_last_void(self.last_void, rows)
        means = {name: value / good if good else None for name, value in zip(self.names, sums, strict=True)}
        self.sums.zero_()
        self.count, self.void = 0, []
        return Reading(means | {"voided_steps": voided}, void, self.last_void)


def _rows(numbers: list[float], count: int) -> list[list[float]]:
    """Split numbers into one row per step, of so many losses."""
    width = count + 1
    return [numbers[i : i + width] for i in range(0, len(numbers), width)]


def _count_last_void(count: int, rows: list[list[float]]) -> int:
    """Return the number of void steps in a row up to the last one, from the number before these rows."""
    for row in rows:
        count = 0 if row[-1] else count + 1
    return count


def _void(rows: list[list[float]], done: int) -> list[Void]:
    """Return the void steps among the last rows of `done` steps."""
    first = done - len(rows) + 1
    return [
        Void(step, [value if math.isfinite(value) else None for value in row[:-1]])
        for step, row in enumerate(rows, first)
        if not row[-1]
    ]
