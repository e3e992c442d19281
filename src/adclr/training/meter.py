"""Losses and bad steps since the last line of metrics.jsonl, kept on the device so that the host need not wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from adclr.system import distributed

# the order of `method.Losses`
NAMES = ("loss", "loss_global", "loss_query", "loss_masked", "teacher_entropy")


Step = Annotated[int, Field(strict=True, ge=1)]
Number = Annotated[float, Field(strict=True)]
Loss = Number | None


class Remembered(BaseModel, extra="forbid"):
    """What a checkpoint holds of a meter; `decoder` makes it."""

    sums: Annotated[list[Number], Field(min_length=len(NAMES) + 2, max_length=len(NAMES) + 2)]
    void: list[tuple[Step, Loss, Loss, Loss, Loss, Loss]]  # by `NAMES`
    last_void: Annotated[int, Field(strict=True, ge=0)] = 0  # which checkpoints had not at first


def checked(remembered: dict[str, Any]) -> dict[str, Any]:
    """The same, or pydantic's error."""
    Remembered.model_validate(remembered)
    return remembered


class Void(NamedTuple):
    """A step that was done without effect, since its loss or a gradient was not finite."""

    step: int  # how many had been done with it
    losses: list[float | None]  # by `NAMES`; None is not finite, and if none is None it was a gradient


class Reading(NamedTuple):
    means: dict[str, float | None]  # over good steps and processes, None if there was none; and how many were void
    void: list[Void]
    last_void: int  # steps in a row, up to the last one


class Meter:
    """`meter.add(done, losses, ok)` after every step; `meter.read()` after at most `every` of them."""

    def __init__(self, device: torch.device, every: int) -> None:
        self.sums = torch.zeros(len(NAMES) + 2, dtype=torch.float64, device=device)  # + good steps, voided steps
        self.rows = torch.zeros(
            every, len(NAMES) + 1, device=device
        )  # the losses of each step, and whether it was good
        self.count = 0  # rows in use
        self.done = 0  # steps
        self.void: list[Void] = []  # those before the first row, of a run that was resumed
        self.last_void = 0

    def add(self, done: int, losses: Tensor, ok: Tensor) -> None:
        row = torch.cat([losses.double(), losses.new_ones(1, dtype=torch.float64)])
        self.sums[:-1] += torch.where(ok, row, 0.0)
        self.sums[-1] += (~ok).double()
        torch.cat([losses, ok.to(losses.dtype).view(1)], out=self.rows[self.count])
        self.count, self.done = self.count + 1, done

    def total(self) -> Tensor:
        """All numbers, summed over the processes, all of which must ask; on the device."""
        return distributed.sum_(torch.cat([self.sums, self.rows[: self.count].flatten().double()]))

    def decoder(self) -> Callable[[Tensor], dict[str, Any]]:
        """What makes of `total`, once it is on the host, what a checkpoint remembers; the meter may go on meanwhile."""
        done, before, world, in_a_row = self.done, list(self.void), distributed.world_size(), self.last_void

        def decode(total: Tensor) -> dict[str, Any]:
            numbers: list[float] = (total / world).tolist()
            rows = _rows(numbers[len(NAMES) + 2 :])
            void = [*before, *_void(rows, done)]
            return {
                "sums": numbers[: len(NAMES) + 2],
                "void": [[v.step, *v.losses] for v in void],
                "last_void": _in_a_row(in_a_row, rows),
            }

        return decode

    def restore(self, remembered: dict[str, Any]) -> None:
        """Goes on where a checkpoint stands."""
        self.sums.copy_(torch.tensor(remembered["sums"], dtype=torch.float64))
        self.void = [Void(int(row[0]), list(row[1:])) for row in remembered["void"]]
        self.last_void = remembered.get("last_void", 0)

    def read(self) -> Reading:
        """All since the last reading, which waits for the device; then it starts anew."""
        numbers: list[float] = (self.total() / distributed.world_size()).tolist()
        *sums, good, voided = numbers[: len(NAMES) + 2]
        rows = _rows(numbers[len(NAMES) + 2 :])
        void = [*self.void, *_void(rows, self.done)]
        self.last_void = _in_a_row(self.last_void, rows)
        means = {name: value / good if good else None for name, value in zip(NAMES, sums, strict=True)}
        self.sums.zero_()
        self.count, self.void = 0, []
        return Reading(means | {"voided_steps": voided}, void, self.last_void)


def _rows(numbers: list[float]) -> list[list[float]]:
    width = len(NAMES) + 1
    return [numbers[i : i + width] for i in range(0, len(numbers), width)]


def _in_a_row(before: int, rows: list[list[float]]) -> int:
    for row in rows:
        before = 0 if row[-1] else before + 1
    return before


def _void(rows: list[list[float]], done: int) -> list[Void]:
    first = done - len(rows) + 1
    return [
        Void(step, [value if math.isfinite(value) else None for value in row[:-1]])
        for step, row in enumerate(rows, first)
        if not row[-1]
    ]
