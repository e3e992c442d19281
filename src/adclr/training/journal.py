"""What a run says while it trains: metrics.jsonl, timing.jsonl, the loggers and the progress line."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor

from adclr.config.sections import UserError
from adclr.config.settings import Settings
from adclr.data.augment import Views
from adclr.data.prefetch import Ahead
from adclr.evals.wording import is_percent
from adclr.report import health
from adclr.system import distributed
from adclr.system.progress import Line
from adclr.system.runs import STOPPED, Run
from adclr.training import loggers
from adclr.training.meter import NAMES, Meter, Void
from adclr.training.plan_text import LONG_SECONDS, long_run
from adclr.training.schedules import Schedules, Values
from adclr.training.signals import Signals

# Lines of voided.jsonl that are written; each has the keys of a whole batch.
MOST_LISTED = 1000
PACE_STEPS = 2  # at least, from which the time of a whole run is estimated


class Probe(Protocol):
    """A look at the teacher between steps."""

    def due(self, done: int) -> bool: ...
    def missing(self, start: int) -> bool: ...  # whether a run that begins here must be scored first
    def __call__(self, signals: Signals) -> dict[str, float]: ...  # nothing if a signal came
    def warning(self, scores: dict[str, float]) -> str | None: ...  # of what is worth one


class Journal:
    """Only the first process writes; all of them meter."""

    def __init__(
        self,
        settings: Settings,
        run: Run,
        schedules: Schedules,
        meter: Meter,
        ahead: Ahead[Views],
        keys: Callable[[int], list[str]],  # of the images of a step
        start: int,
    ) -> None:
        self.settings, self.run, self.schedules, self.meter, self.ahead = settings, run, schedules, meter, ahead
        self.keys, self.start = keys, start
        self.main = distributed.is_main()
        self.writers = loggers.open_loggers(settings, run.path, start) if self.main else []
        self.line = Line("pretrain", schedules.total_steps, start, show=self.main)
        self.clock, self.marked, self.text = time.monotonic(), start, ""
        self.aside: dict[str, float] = {}  # seconds since the last line of timing.jsonl that went into no steps
        rows = [row for row in run.rows("metrics.jsonl") if not row.get(STOPPED)]  # the first process may yet cut it
        self.looks = [row for row in rows if "target_kl" in row and row.get("step", 0) <= start]
        self.looked_at: int | None = None  # step of the last look
        self.finding: str | None = None  # what was last said of it
        self.condition = ""
        self.troubled = False  # lines are held back, which was said
        self.listed = sum(1 for _ in run.rows("voided.jsonl"))
        self.on_gpu = meter.sums.is_cuda
        self.paced: tuple[int, float] | None = None  # step and time since when the pace is measured
        self.estimated = False

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
        if kind is None:
            self._rest()
        for writer in self.writers:
            with suppress(OSError):  # a full disk
                writer.close()

    def say(self, text: str) -> None:
        self.line.say(text)

    def step(self, done: int, values: Values, losses: Tensor, ok: Tensor, look: Callable[[], dict[str, float]]) -> None:
        """Takes note of a step; every few this is where the host waits for the device, and `look`s at its health."""
        self.meter.add(done, losses, ok)
        line_is_due = done % self.settings.train.log_every_steps == 0 or done == self.schedules.total_steps
        if line_is_due:
            means, void, last_void = self.meter.read()
            seconds = time.monotonic() - self.clock
            speed = (done - self.marked) * self.settings.train.batch_size / seconds
            self._time(done, seconds, speed)
            self.clock, self.marked = time.monotonic(), done
            schedule = {
                name: value
                for name, value in vars(values).items()
                if value is not None and not name.startswith("freeze")
            }
            seen = self._health(done, look, means["loss_global"]) if self._look_is_due(done) else {}
            self.write(done, means | schedule | seen)
            self.text = f"{_describe(means, speed)}{self.condition}"
            self._note_void(done, void, last_void)
        if line_is_due or not self.on_gpu:  # else the host does not know how far the GPU is
            self._estimate(done)
        self.line.move(done, self.text)

    def _estimate(self, done: int) -> None:
        """Warns once of a run that takes over a day, by its first steps but the very first, which sets things up."""
        if self.estimated:
            return
        now = time.monotonic()
        if self.paced is None:
            self.paced = done, now
        elif done - self.paced[0] >= PACE_STEPS:
            self.estimated = True
            left = (now - self.paced[1]) / (done - self.paced[0]) * (self.schedules.total_steps - done)
            if left > LONG_SECONDS:
                self.say(f"warning: {long_run(left, self.on_gpu)}")

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Takes note of how long something other than steps takes; in timing.jsonl as `seconds_NAME`."""
        started = time.monotonic()
        yield
        name = f"seconds_{name}"
        self.aside[name] = self.aside.get(name, 0.0) + time.monotonic() - started

    def _time(self, done: int, seconds: float, speed: float | None) -> None:
        """A line of timing.jsonl: all the time since the last one, but for that of probes, and its parts."""
        waited, self.ahead.seconds_waited = self.ahead.seconds_waited, 0.0
        aside, self.aside = self.aside, {}
        if self.main:
            row: dict[str, float] = {"step": done, "seconds": seconds, "seconds_waiting_for_images": waited}
            self.run.append("timing.jsonl", row | ({} if speed is None else {"images_per_second": speed}) | aside)

    def _rest(self) -> None:
        """After the last line come the last look, checkpoint and pictures, and the wait until that is on the disk."""
        done, seconds = max(self.start, self.meter.done), time.monotonic() - self.clock
        if done == self.marked:  # no steps
            known = sum(value for name, value in self.aside.items() if name != "seconds_probing")
            self.aside["seconds_saving"] = self.aside.get("seconds_saving", 0.0) + max(0.0, seconds - known)
        self._time(done, seconds, None)

    def _look_is_due(self, done: int) -> bool:
        """At the first line, with which later ones are compared, at those next to every so many steps, at the last."""
        every, lines = self.settings.train.health_every_steps, self.settings.train.log_every_steps
        if every is None:
            return False
        return not self.looks or done // every > (done - lines) // every or done == self.schedules.total_steps

    def stop(self, done: int, look: Callable[[], dict[str, float]]) -> None:
        """Writes the last row of a run that was told to stop: that it was, and its health.

        The row has no losses: those since the last line go on in the checkpoint. All processes must call it.
        """
        health_row: dict[str, float | None] = {}
        if self.settings.train.health_every_steps is not None and self.looked_at != done:
            health_row = self._health(done, look, None)
        if self.main:
            row = {"step": done, "epoch": done / self.schedules.steps_per_epoch, STOPPED: True} | health_row
            self.run.append("metrics.jsonl", row)

    def _health(self, done: int, look: Callable[[], dict[str, float]], loss: float | None) -> dict[str, float | None]:
        with self.timed("looking"):
            found = look()
        self.looks.append(found)
        self.looked_at = done
        finding = health.diagnose(self.looks)
        self.condition = f", kl {found['target_kl']:.2g}, rank {found['rank_cls']:.1f}"
        if finding is not None:
            self.condition += f", {finding.name}"
            if finding.name != self.finding:
                self.say(f"step {done}: {finding.name}: {finding.words}")
        self.finding = None if finding is None else finding.name
        of_uniform = None if loss is None else loss / math.log(self.settings.method.num_prototypes)
        return found | {"loss_of_log_k": of_uniform}

    def _note_void(self, done: int, void: list[Void], last: int) -> None:
        """Lists the steps that were void with the keys of their images; ends a run in which nothing else happens."""
        for step, losses in void if self.main else ():
            cause = "a loss" if None in losses else "a gradient"
            if not self.listed:
                self.say(f"step {step} was void, for {cause} was not finite; voided.jsonl says of which images")
            if self.listed < MOST_LISTED:
                row = {"step": step, "epoch": (step - 1) // self.schedules.steps_per_epoch, "cause": cause}
                row |= {"losses": dict(zip(NAMES, losses, strict=True)), "keys": self.keys(step)}
                self.run.append("voided.jsonl", row)
            self.listed += 1
        most = self.settings.train.max_void_steps
        if last >= most or (done == self.schedules.total_steps and last >= done - self.start > 0):
            first = done - last + 1
            raise UserError(
                f"the last {last} steps were void, their losses or gradients not finite; look where it begins by "
                f"adclr pretrain --out {self.run.path} --replay {first}, or choose another --out and a lower optim.lr, "
                "a longer optim.warmup_epochs or train.precision=float32"
            )

    def write(self, step: int, row: dict[str, float | None]) -> None:
        if not self.main:
            return
        self.run.append("metrics.jsonl", {"step": step, "epoch": step / self.schedules.steps_per_epoch} | row)
        if (self.run.trouble is not None) != self.troubled:
            self.troubled = not self.troubled
            self.say(
                f"{self.run.path} cannot be written ({self.run.trouble.strerror}); its lines are held back meanwhile"
                if self.run.trouble
                else f"{self.run.path} can be written again, and nothing is missing"
            )
        numbers = {name: value for name, value in row.items() if value is not None}
        for writer in list(self.writers):
            try:
                writer.log(step, numbers)
            except Exception as error:  # of whatever kind the package has; no run should end of it
                self.writers.remove(writer)
                self.say(f"{type(writer).__name__} gets no more curves, for it failed ({error}); metrics.jsonl has all")

    def score(self, step: int, probe: Probe, signals: Signals) -> None:
        """Takes a probe and notes it; its time is not the training's."""
        started = time.monotonic()
        with self.timed("probing"):
            scores = probe(signals)
        if scores:
            self.write(step, dict(scores))
        for name, value in scores.items():
            text = f"{value:.1f} %" if is_percent(name) else f"{value:.3g}"
            self.say(f"epoch {step / self.schedules.steps_per_epoch:.0f}: {name} {text}")
        warning = probe.warning(scores)
        if warning:
            self.say(f"warning: {warning}")
        self.clock += time.monotonic() - started


def _describe(means: dict[str, float | None], speed: float) -> str:
    parts = [f"{name.removeprefix('loss_')} {means[name]:.3f}" for name in NAMES[:4] if means[name]]
    voided = f", {means['voided_steps']:.0f} steps void" if means["voided_steps"] else ""
    return f"{', '.join(parts)}{voided}, {speed:.0f} images/s"
