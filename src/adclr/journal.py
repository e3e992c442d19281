"""What a run says while it trains: metrics.jsonl, timing.jsonl, the loggers and the progress line."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from adclr import distributed, loggers
from adclr.ahead import Ahead
from adclr.augment import Views
from adclr.config import UserError
from adclr.optim import Schedules, Values
from adclr.progress import Line
from adclr.runs import Run
from adclr.settings import Settings

# the order of `method.Losses`
NAMES = ("loss", "loss_global", "loss_query", "loss_masked", "teacher_entropy")


# Steps in a row, all void, after which a run stops: no training comes back from that on its own.
MOST_VOID = 50


class Meter:
    """Sums of the losses since the last line, kept on the device so that the host need not wait."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(NAMES) + 2, dtype=torch.float64, device=device)  # + good steps, voided steps

    def add(self, losses: Tensor, ok: Tensor) -> None:
        row = torch.cat([losses.double(), losses.new_ones(1, dtype=torch.float64)])
        self.sums[:-1] += torch.where(ok, row, 0.0)
        self.sums[-1] += (~ok).double()

    def mean(self) -> list[float]:
        """The sums, mean over the processes, all of which must ask."""
        found: list[float] = (distributed.sum_(self.sums.clone()) / distributed.world_size()).tolist()
        return found

    def read(self) -> dict[str, float | None]:
        """Means over steps and processes (None if no step was good) and how many steps were void; then starts anew."""
        *sums, good, voided = self.mean()
        self.sums.zero_()
        means = {name: value / good if good else None for name, value in zip(NAMES, sums, strict=True)}
        return means | {"voided_steps": voided}


class Journal:
    """Only the first process writes; all of them meter."""

    def __init__(
        self, settings: Settings, run: Run, schedules: Schedules, meter: Meter, ahead: Ahead[Views], start: int
    ) -> None:
        self.settings, self.run, self.schedules, self.meter, self.ahead = settings, run, schedules, meter, ahead
        self.main = distributed.is_main()
        self.writers = loggers.open_loggers(settings, run.path, start) if self.main else []
        self.line = Line("pretrain", schedules.total_steps, start, show=self.main)
        self.clock, self.marked, self.text = time.monotonic(), start, ""
        self.void = 0.0  # steps in a row

    def __enter__(self) -> Self:
        self.line.__enter__()
        train = self.settings.train
        self.say(
            f"{train.epochs} epochs, {self.schedules.total_steps} steps of {train.batch_size} images: {self.run.path}"
        )
        self.clock = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.line.__exit__(kind, error, trace)
        for writer in self.writers:
            writer.close()

    def say(self, text: str) -> None:
        self.line.say(text)

    def step(self, done: int, values: Values, losses: Tensor, ok: Tensor) -> None:
        """Takes note of a step; every few steps this is where the host waits for the device."""
        self.meter.add(losses, ok)
        if done % self.settings.train.log_every_steps == 0 or done == self.schedules.total_steps:
            means = self.meter.read()
            seconds = time.monotonic() - self.clock
            speed = (done - self.marked) * self.settings.train.batch_size / seconds
            self.clock, self.marked = time.monotonic(), done
            schedule = {name: value for name, value in vars(values).items() if name != "freeze_last_layer"}
            self.write(done, means | schedule)
            if self.main:
                waited, self.ahead.seconds_waited = self.ahead.seconds_waited, 0.0
                row = {
                    "step": done,
                    "seconds": seconds,
                    "images_per_second": speed,
                    "seconds_waiting_for_images": waited,
                }
                self.run.append("timing.jsonl", row)
            self.text = _describe(means, speed)
            self._stop_if_void(done, means)
        self.line.move(done, self.text)

    def _stop_if_void(self, done: int, means: dict[str, float | None]) -> None:
        self.void = 0.0 if means["loss"] is not None else self.void + (means["voided_steps"] or 0)
        if self.void >= MOST_VOID or (self.void and done == self.schedules.total_steps):
            raise UserError(
                f"the last {self.void:.0f} steps were void, their losses or gradients not finite; "
                "choose another --out and a lower optim.lr, or look at the settings that are not usual"
            )

    def write(self, step: int, row: dict[str, float | None]) -> None:
        if not self.main:
            return
        self.run.append("metrics.jsonl", {"step": step, "epoch": step / self.schedules.steps_per_epoch} | row)
        numbers = {name: value for name, value in row.items() if value is not None}
        for writer in self.writers:
            writer.log(step, numbers)

    def score(self, step: int, probe: Callable[[], dict[str, float]]) -> None:
        """Takes a probe and notes it; its time is not the training's."""
        started = time.monotonic()
        scores = probe()
        self.write(step, dict(scores))
        for name, value in scores.items():
            self.say(f"epoch {step / self.schedules.steps_per_epoch:.0f}: {name} {value:.1f} %")
        self.clock += time.monotonic() - started


def _describe(means: dict[str, float | None], speed: float) -> str:
    parts = [f"{name.removeprefix('loss_')} {means[name]:.3f}" for name in NAMES[:4] if means[name]]
    voided = f", {means['voided_steps']:.0f} steps void" if means["voided_steps"] else ""
    return f"{', '.join(parts)}{voided}, {speed:.0f} images/s"
