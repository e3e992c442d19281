"""Checkpoints written while training goes on: the step waits for a copy in memory, never for the disk."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from adclr.config.sections import UserError
from adclr.config.settings import Settings
from adclr.system import distributed
from adclr.system.runs import Run
from adclr.training import checkpoint
from adclr.training.checkpoint import State
from adclr.weights import snapshot
from adclr.weights.snapshot import Parts

# Saves in a row that may fail while training goes on; the last checkpoint that is there grows older meanwhile.
MOST_FAILED = 3
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Writer:
    """`writer.save(state, tensors, metered, decode)` in all processes; the first one writes, in a thread.

    The copy is taken in the stream of the training, before the next step can change anything: 0.7 GB of a ViT-S with
    65536 prototypes take 15 ms of a GPU's time to pinned memory (at 50 GB/s), and no time of the host, which a copy in
    another stream would not shorten, since the step would have to wait for it. A second save waits for the first to be
    on the disk, so there is one copy. A save that fails leaves the checkpoint before; training goes on, and stops only
    after three in a row, or if it was the last.
    """

    def __init__(self, run: Run, settings: Settings, say: Callable[[str], None]) -> None:
        self.run, self.keep, self.say = run, settings.train.keep_checkpoints, say
        self.may_free, self.minutes = settings.train.free_checkpoints, settings.train.checkpoint_every_minutes
        self.main = distributed.is_main()
        self.failed = 0  # saves in a row
        self.error: OSError | None = None  # of the last save
        self.step = 0  # of the last save
        self._saved = time.monotonic()  # when that was; at first the start
        self._notes: list[str] = []  # of the thread, for the loop to say
        self._copies: Parts = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What is being written is finished, whatever ended the training."""
        try:
            self.wait()
            if kind is None and self.error is not None:
                raise self._sorry(self.error)
        finally:
            self._thread.shutdown()

    def overdue(self) -> bool:
        """Whether a checkpoint is due by the clock; only the first process says so, since clocks differ."""
        return self.main and self.minutes is not None and time.monotonic() - self._saved >= 60 * self.minutes

    def save(self, state: State, tensors: Parts, metered: Tensor, decode: Callable[[Tensor], dict[str, Any]]) -> None:
        """`decode` makes the state's meter of what was metered, once that is on the host."""
        self.wait()
        self._saved = time.monotonic()
        copies = {part: self._copied(part, named) for part, named in tensors.items()}
        if not self.main:
            return
        copied = metered.new_empty(metered.shape, device="cpu", pin_memory=metered.is_cuda)
        copied.copy_(metered, non_blocking=True)
        ready = torch.cuda.current_stream(metered.device).record_event() if metered.is_cuda else None

        def work() -> None:
            if ready is not None:
                ready.synchronize()
            self._write(replace(state, meter=decode(copied)), copies)

        self._writing = self._thread.submit(work)

    def check(self) -> None:
        """Raises what went wrong with a write that has ended; asks nothing of one that has not."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Until what was saved is on the disk, or is known not to be."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.result()
        while self._notes:
            self.say(self._notes.pop(0))
        if self.error is None:
            return
        if self.failed >= MOST_FAILED:
            raise self._sorry(self.error)
        self.say(f"{self._what(self.error)}; training goes on, and the next checkpoint is tried when it is due")

    def _copied(self, part: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Into memory that is kept from save to save, since to pin it takes longer than to fill it."""
        kept = self._copies.setdefault(part, {})
        for name, tensor in tensors.items():
            whole = distributed.whole(tensor.detach())  # one at a time, where they are spread
            if self.main:
                if name not in kept:
                    kept[name] = _host_memory(whole)
                kept[name].copy_(whole, non_blocking=True)
        return {name: kept[name] for name in tensors if self.main}

    def _write(self, state: State, tensors: Parts) -> None:
        self.error, self.step = None, state.step
        while True:
            try:
                self.run.settle()  # first: a run that goes on from here does not write those lines again
                checkpoint.write(self.run, state, tensors, self.keep)
                self.failed = 0
                return
            except OSError as error:
                if not (error.errno in FULL and self.may_free and self._free_one()):
                    self.error, self.failed = error, self.failed + 1
                    return

    def _free_one(self) -> bool:
        """Deletes the oldest checkpoint, but never the newest for one that is not there yet."""
        steps = self.run.steps()
        if len(steps) < 2 or not snapshot.free(self.run, keep=len(steps) - 1):
            return False
        self._notes.append(f"the disk of {self.run.path} is full: the checkpoint of step {steps[0]} was deleted")
        return True

    def _what(self, error: OSError) -> str:
        reason = error.strerror or error
        return f"the checkpoint of step {self.step} cannot be written to {self.run.checkpoints} ({reason})"

    def _sorry(self, error: OSError) -> UserError:
        steps = self.run.steps()
        where = f"from step {steps[-1]}, the last that was saved" if steps else "from the start"
        remedy = "make room there" if error.errno in FULL else "see to that disk"
        return UserError(f"{self._what(error)}; {remedy}, and the same command goes on {where}")


def _host_memory(like: Tensor) -> Tensor:
    if like.is_cuda:
        try:
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        except RuntimeError:  # no more of it can be pinned; then the copy waits for the GPU
            pass
    return torch.empty(like.shape, dtype=like.dtype)
