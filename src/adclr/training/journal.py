"""The log of a run while it trains: metrics.jsonl, timing.jsonl, voided.jsonl, the loggers and the progress line."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.data.feed import Prefetcher
from adclr.evals.score_text import is_percent
from adclr.model.named_tensors import Views
from adclr.report import health
from adclr.system import distributed
from adclr.system.progress import ProgressLine
from adclr.system.runs import STOPPED, Run
from adclr.training import loggers
from adclr.training.meter import Meter, Void
from adclr.training.plan_cost import LONG_SECONDS, describe_long_run
from adclr.training.schedules import Schedules, Values
from adclr.training.signals import Signals

MAX_VOIDED_ROWS = 1000  # of voided.jsonl; each has the keys of a whole batch
NOT_IN_SECONDS = ("seconds_probing", "seconds_starting", "seconds_to_first_step")  # of timing.jsonl's `seconds`
PACE_STEPS = 2  # at least, from which the time of a whole run is estimated


class Probe(Protocol):
    """Scores the teacher between steps."""

    def due(self, done: int) -> bool:
        """Return whether the teacher is scored after so many steps."""

    def missing(self, start: int) -> bool:
        """Return whether a run that starts at this step must be scored first."""

    def __call__(self, signals: Signals) -> dict[str, float]:
        """Return the scores; none if a signal came."""

    def warning(self, scores: dict[str, float]) -> str | None:
        """Return a warning about scores, if there is one."""


class Journal:
    """Meters every step in all processes; only the first one writes."""

    def __init__(
        self,
        settings: Settings,
        run: Run,
        schedules: Schedules,
        meter: Meter,
        views: Prefetcher[Views],
        keys: Callable[[int], list[str]],  # of the images of a step
        start: int,
        started: float | None = None,  # when the command began, by `time.monotonic`
        start_parts: Mapping[str, float] | None = None,  # seconds of the parts of the start
    ) -> None:
        self.settings, self.run, self.schedules, self.meter, self.views = settings, run, schedules, meter, views
        self.keys, self.start = keys, start
        self.main = distributed.is_main()
        self.loggers = loggers.open_loggers(settings, run.path, start) if self.main else []
        self.line = ProgressLine(settings.command, schedules.total_steps, start, show=self.main)
        self.logged_at, self.logged_step, self.text = time.monotonic(), start, ""  # of the last line
        self.other_seconds: dict[str, float] = {}  # not spent on steps, since the last line of timing.jsonl
        self.started = self.logged_at if started is None else started
        self.start_parts = dict(start_parts or {})
        self.probe_seconds = 0.0  # before the first step
        rows = [row for row in run.rows("metrics.jsonl") if not row.get(STOPPED)]  # the first process may yet cut it
        self.health_rows = [row for row in rows if health.is_measured(row) and row.get("step", 0) <= start]
        self.health_step: int | None = None  # of the last of them
        self.findings: set[str] = set()  # names of the last ones, which were printed
        self.health_text = ""
        self.warned_of_disk = False  # that lines are held back
        self.num_voided = sum(1 for _ in run.rows("voided.jsonl"))
        self.on_gpu = meter.sums.is_cuda
        # schedules without a meaning in a distillation
        self.unlogged = ("momentum", "teacher_temperature") if settings.command == "distill" else ()
        self.pace_start: tuple[int, float] | None = None  # step and time since when the pace is measured
        self.pace_checked = False

    def __enter__(self) -> Self:
        self.line.__enter__()
        train = self.settings.train
        self.say(
            f"{train.epochs} epochs, {self.schedules.total_steps} steps of {train.batch_size} images: {self.run.path}"
        )
        self.logged_at = time.monotonic()
        self.other_seconds["seconds_starting"] = self.logged_at - self.started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.line.__exit__(kind, error, trace)
        if kind is None:
            self._log_last_timing()
        for logger in self.loggers:
            with suppress(OSError):  # a full disk
                logger.close()

    def say(self, text: str) -> None:
        """Print a line above the progress line."""
        self.line.say(text)

    def step(
        self, done: int, values: Values, losses: Tensor, ok: Tensor, measure: Callable[[], dict[str, float]]
    ) -> None:
        """Meter a step; every few steps write a line, for which the host waits for the device, and `measure` health."""
        self.meter.add(done, losses, ok)
        if done == self.start + 1:
            self._note_first_step()
        line_is_due = done % self.settings.train.log_every_steps == 0 or done == self.schedules.total_steps
        if line_is_due:
            means, void, last_void = self.meter.read()
            seconds = time.monotonic() - self.logged_at
            speed = (done - self.logged_step) * self.settings.train.batch_size / seconds
            self._log_timing(done, seconds, speed)
            self.logged_at, self.logged_step = time.monotonic(), done
            schedule = {
                name: value
                for name, value in vars(values).items()
                if value is not None and name not in self.unlogged and not name.startswith("freeze")
            }
            health_row = self._health(done, measure, means.get("loss_global")) if self._health_is_due(done) else {}
            self.write(done, means | schedule | health_row)
            self.text = f"{_describe(means, self.meter.names, speed)}{self.health_text}"
            self._log_void(done, void, last_void)
        if line_is_due or not self.on_gpu:  # else the host does not know how far the GPU is
            self._check_pace(done)
        self.line.move(done, self.text)

    def _note_first_step(self) -> None:
        """Wait for the first step of this start, and note the time since the command began, without that of probes."""
        if self.on_gpu:
            torch.cuda.synchronize(self.meter.sums.device)
        seconds = time.monotonic() - self.started - self.probe_seconds
        self.other_seconds["seconds_to_first_step"] = seconds
        self.say(f"first step done {seconds:.1f} s after the command")

    def _check_pace(self, done: int) -> None:
        """Warn once of a run that takes over a day, by its first steps without the very first, which sets things up."""
        if self.pace_checked:
            return
        now = time.monotonic()
        if self.pace_start is None:
            self.pace_start = done, now
        elif done - self.pace_start[0] >= PACE_STEPS:
            self.pace_checked = True
            left = (now - self.pace_start[1]) / (done - self.pace_start[0]) * (self.schedules.total_steps - done)
            if left > LONG_SECONDS:
                self.say(f"warning: {describe_long_run(left, self.on_gpu, self.settings.command)}")

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure how long something other than steps takes; in timing.jsonl as `seconds_NAME`."""
        started = time.monotonic()
        yield
        name = f"seconds_{name}"
        self.other_seconds[name] = self.other_seconds.get(name, 0.0) + time.monotonic() - started

    def _log_timing(self, done: int, seconds: float, speed: float | None) -> None:
        """Write a line of timing.jsonl: the time since the last one without that of probes, and its parts."""
        waited, self.views.seconds_waited = self.views.seconds_waited, 0.0
        others, self.other_seconds = self.other_seconds, {}
        if self.main:
            row: dict[str, Any] = {"step": done, "seconds": seconds, "seconds_waiting_for_images": waited}
            row |= {"parts_of_starting": self.start_parts} if "seconds_starting" in others and self.start_parts else {}
            self.run.append("timing.jsonl", row | ({} if speed is None else {"images_per_second": speed}) | others)

    def _log_last_timing(self) -> None:
        """Write the time after the last line: health, checkpoint, pictures, and the wait until they are on the disk."""
        done, seconds = max(self.start, self.meter.done), time.monotonic() - self.logged_at
        if done == self.logged_step:  # no steps
            known = sum(value for name, value in self.other_seconds.items() if name not in NOT_IN_SECONDS)
            self.other_seconds["seconds_saving"] = self.other_seconds.get("seconds_saving", 0.0) + max(
                0.0, seconds - known
            )
        self._log_timing(done, seconds, None)

    def _health_is_due(self, done: int) -> bool:
        """Return whether a line has health: the first, to compare others with, every so many steps, the last."""
        every, lines = self.settings.train.health_every_steps, self.settings.train.log_every_steps
        if every is None:
            return False
        return not self.health_rows or done // every > (done - lines) // every or done == self.schedules.total_steps

    def stop(self, done: int, measure: Callable[[], dict[str, float]]) -> None:
        """Write the last row of a run that a signal stops: that it was stopped, and its health.

        The row has no losses: those since the last line are in the checkpoint. All processes must call it.
        """
        health_row: dict[str, float | None] = {}
        if self.settings.train.health_every_steps is not None and self.health_step != done:
            health_row = self._health(done, measure, None)
        if self.main:
            row = {"step": done, "epoch": done / self.schedules.steps_per_epoch, STOPPED: True} | health_row
            self.run.append("metrics.jsonl", row)

    def _health(
        self, done: int, measure: Callable[[], dict[str, float]], loss: float | None
    ) -> dict[str, float | None]:
        """Return the health measures of a row, and print a finding that is new."""
        with self.timed("looking"):
            measures = measure()
        self.health_rows.append(measures)
        self.health_step = done
        method = self.settings.method
        last = method.teacher_temperature if method.query_temperature is None else method.query_temperature
        collapse = health.diagnose(self.health_rows)
        shortcut = health.diagnose_shortcut(self.health_rows, last_temperature=last)
        findings = [finding for finding in (collapse, shortcut) if finding is not None]
        self.health_text = f", {health.summarize(measures)}"
        for finding in findings:
            self.health_text += f", {finding.name}"
            if finding.name not in self.findings:
                self.say(f"step {done}: {finding.name}: {finding.words}")
        self.findings = {finding.name for finding in findings}
        if self.settings.command == "distill":
            return dict(measures)
        of_uniform = None if loss is None else loss / math.log(self.settings.method.num_prototypes)
        return measures | {"loss_of_log_k": of_uniform}

    def _log_void(self, done: int, void: list[Void], last: int) -> None:
        """List void steps with the keys of their images; raise a UserError after too many in a row."""
        for step, losses in void if self.main else ():
            cause = "a loss" if None in losses else "a gradient"
            if not self.num_voided:
                self.say(f"step {step} had no effect, because {cause} was not finite; voided.jsonl lists its images")
            if self.num_voided < MAX_VOIDED_ROWS:
                row = {"step": step, "epoch": (step - 1) // self.schedules.steps_per_epoch, "cause": cause}
                row |= {"losses": dict(zip(self.meter.names, losses, strict=True)), "keys": self.keys(step)}
                self.run.append("voided.jsonl", row)
            self.num_voided += 1
        most = self.settings.train.max_void_steps
        if last >= most or (done == self.schedules.total_steps and last >= done - self.start > 0):
            first = done - last + 1
            raise UserError(
                f"the last {last} steps had no effect: their losses or gradients were not finite; find the cause with "
                f"adclr {self.settings.command} --out {self.run.path} --replay {first}, or choose another --out and a "
                "lower optim.lr, a longer optim.warmup_epochs or train.precision=float32"
            )

    def write(self, step: int, row: dict[str, float | None]) -> None:
        """Append a row to metrics.jsonl and pass it to the loggers."""
        if not self.main:
            return
        self.run.append("metrics.jsonl", {"step": step, "epoch": step / self.schedules.steps_per_epoch} | row)
        if (self.run.trouble is not None) != self.warned_of_disk:
            self.warned_of_disk = not self.warned_of_disk
            self.say(
                f"{self.run.path} cannot be written ({self.run.trouble.strerror}); its lines are held back meanwhile"
                if self.run.trouble
                else f"{self.run.path} can be written again, and nothing is missing"
            )
        numbers = {name: value for name, value in row.items() if value is not None}
        for logger in list(self.loggers):
            try:
                logger.log(step, numbers)
            except Exception as error:  # each package has its own; none should end the run
                self.loggers.remove(logger)
                self.say(f"{type(logger).__name__} failed and gets no more curves ({error}); metrics.jsonl has all")

    def score(self, step: int, probe: Probe, signals: Signals) -> None:
        """Score the teacher, write and print the scores; the time is not counted as training."""
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
        seconds = time.monotonic() - started
        self.logged_at += seconds
        self.probe_seconds += seconds


def _describe(means: dict[str, float | None], names: tuple[str, ...], speed: float) -> str:
    """Return losses and speed for the progress line."""
    parts = [f"{name.removeprefix('loss_')} {means[name]:.3f}" for name in names[:-1] if means[name]]
    voided = f", {means['voided_steps']:.0f} steps void" if means["voided_steps"] else ""
    return f"{', '.join(parts)}{voided}, {speed:.0f} images/s"
