"""Checkpoints written while training continues: a step waits for a copy in memory, never for the disk."""

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

from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.system import distributed
from adclr.system.runs import Run
from adclr.training import checkpoint
from adclr.training.checkpoint import State
from adclr.weights import snapshot
from adclr.weights.snapshot import Parts

# Saves in a row that may fail before the run ends; the newest checkpoint grows older meanwhile.
MAX_FAILED = 3
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Writer:
    """`writer.save(state, tensors, meter_total, decode)` in all processes; the first one writes, in a thread.

    The copy is made in the stream of the training, before the next step can change anything: 0.7 GB of a ViT-S with
    65536 prototypes take 15 ms of a GPU's time to pinned memory (at 50 GB/s), and no time of the host. A copy in
    another stream would not be faster, since the step would have to wait for it. A second save waits until the first is
    on the disk, so there is one copy. After a save that fails, the checkpoint before is still there and training
    continues; it stops only after three in a row, or if it was the last.
    """

    def __init__(self, run: Run, settings: Settings, say: Callable[[str], None]) -> None:
        self.run, self.keep, self.say = run, settings.train.keep_checkpoints, say
        self.may_free, self.minutes = settings.train.free_checkpoints, settings.train.checkpoint_every_minutes
        self.main = distributed.is_main()
        self.failed = 0  # saves in a row
        self.error: OSError | None = None  # of the last save
        self.step = 0  # of the last save
        self._saved = time.monotonic()  # time of the last save, at first of the start
        self._messages: list[str] = []  # of the thread, for the main thread to print
        self._copies: Parts = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish what is being written, whatever ended the training."""
        try:
            self.wait()
            if kind is None and self.error is not None:
                raise self._final_error(self.error)
        finally:
            self._thread.shutdown()

    def overdue(self) -> bool:
        """Return whether a checkpoint is due by the clock; True only in the first process, since clocks differ."""
        return self.main and self.minutes is not None and time.monotonic() - self._saved >= 60 * self.minutes

    def save(
        self, state: State, tensors: Parts, meter_total: Tensor, decode: Callable[[Tensor], dict[str, Any]]
    ) -> None:
        """Copy everything to the host and write it in a thread; `decode` turns `meter_total` into the state's meter."""
        self.wait()
        self._saved = time.monotonic()
        copies = {part: self._copy_to_host(part, named) for part, named in tensors.items()}
        if not self.main:
            return
        on_gpu = meter_total.is_cuda
        total = meter_total.new_empty(meter_total.shape, device="cpu", pin_memory=on_gpu)
        total.copy_(meter_total, non_blocking=True)
        copied = torch.cuda.current_stream(meter_total.device).record_event() if on_gpu else None

        def work() -> None:
            if copied is not None:
                copied.synchronize()
            self._write(replace(state, meter=decode(total)), copies)

        self._writing = self._thread.submit(work)

    def check(self) -> None:
        """Report the result of a write that has ended; never wait for one that has not."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is on the disk or has failed; raise a UserError after too many failures."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.result()
        while self._messages:
            self.say(self._messages.pop(0))
        if self.error is None:
            return
        if self.failed >= MAX_FAILED:
            raise self._final_error(self.error)
        self.say(f"{self._describe(self.error)}; training continues, and the next checkpoint is tried when it is due")

    def _copy_to_host(self, part: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors into memory that is reused by later saves, since pinning it takes longer than filling it."""
        copies = self._copies.setdefault(part, {})
        for name, tensor in tensors.items():
            full = distributed.full_tensor(tensor.detach())  # gathered one at a time, where they are sharded
            if self.main:
                if name not in copies:
                    copies[name] = _host_memory(full)
                copies[name].copy_(full, non_blocking=True)
        return {name: copies[name] for name in tensors if self.main}

    def _write(self, state: State, tensors: Parts) -> None:
        """Write a checkpoint, in the thread; on a full disk delete the oldest ones until it fits, if allowed."""
        self.error, self.step = None, state.step
        while True:
            try:
                self.run.settle()  # first: a run that resumes from here does not write those lines again
                checkpoint.write(self.run, state, tensors, self.keep)
                self.failed = 0
                return
            except OSError as error:
                if not (error.errno in DISK_FULL and self.may_free and self._delete_oldest()):
                    self.error, self.failed = error, self.failed + 1
                    return

    def _delete_oldest(self) -> bool:
        """Delete the oldest checkpoint, but never the only one; return whether one was deleted."""
        steps = self.run.steps()
        if len(steps) < 2 or not snapshot.delete_old(self.run, keep=len(steps) - 1):
            return False
        self._messages.append(f"the disk of {self.run.path} is full: the checkpoint of step {steps[0]} was deleted")
        return True

    def _describe(self, error: OSError) -> str:
        reason = error.strerror or error
        return f"the checkpoint of step {self.step} cannot be written to {self.run.checkpoints} ({reason})"

    def _final_error(self, error: OSError) -> UserError:
        steps = self.run.steps()
        where = f"from step {steps[-1]}, the last that was saved" if steps else "from the start"
        remedy = "make room there" if error.errno in DISK_FULL else "check that disk"
        return UserError(f"{self._describe(error)}; {remedy}, and the same command resumes {where}")


def _host_memory(like: Tensor) -> Tensor:
    """Return an empty tensor on the host, pinned for one on a GPU if possible."""
    if like.is_cuda:
        try:
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        except RuntimeError:  # no more memory can be pinned; then the copy waits for the GPU
            pass
    return torch.empty(like.shape, dtype=like.dtype)
