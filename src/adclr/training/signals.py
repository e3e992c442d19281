"""SIGTERM, SIGINT and SIGUSR1: the first saves after the step and ends the run; a second ends it at once."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

from adclr.system import distributed

T = TypeVar("T")
# Windows, where weights can be loaded but nothing is written, has no SIGUSR1
SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
SAVED = 75  # the exit code: EX_TEMPFAIL of sysexits.h, which says "not done, try again later"
# A launcher passes a signal on to processes that may have received it already: within so many seconds it counts once.
REPEAT_SECONDS = 1.0


class Stopped(SystemExit):
    """The run was stopped by a signal and its checkpoint is on the disk; uncaught, it ends the program with code 75."""


class Decision(NamedTuple):
    """What all processes do after a step."""

    stop: bool
    save: bool


class Signals:
    """`with Signals(say) as signals: ... if signals.poll().stop: break`; all processes poll after every step.

    A thread receives the signals, so that a second one ends the process even while the main thread waits for a GPU or
    for processes that do not answer. That is harmless: a file that is being written has a temporary name.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.caught: signal.Signals | None = None
        self._interruptible = False
        self._handlers: dict[signal.Signals, Any] = {}  # those before ours
        self._hosts = distributed.HostGroup()
        self._pending: Callable[[], list[bool]] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers in no other
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            self._handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
            self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._handlers:
            signal.set_wakeup_fd(self._wakeup)
            self._writer.close()
            self._thread.join()
            self._reader.close()
        if kind is None and self._pending is not None:
            self._pending()  # the other processes, at the same step, wait for it too

    def poll(self, overdue: bool = False) -> Decision:
        """Return whether to stop now, and whether to save because a checkpoint is `overdue` in some process.

        The decision after the same step is the same in every process, and no GPU is waited for: between several
        processes a few bytes travel between hosts during the next step, so the decision is that of the step before.
        """
        if not distributed.in_group():
            return Decision(self.caught is not None, overdue)
        decision = Decision(False, False) if self._pending is None else Decision(*self._pending())
        self._pending = None
        if not decision.stop:  # a checkpoint that is about to be saved is not requested again
            self._pending = self._hosts.ask(self.caught is not None, overdue and not decision.save)
        return decision

    def interruptible(self, work: Callable[[], T]) -> T | None:
        """Return the result of some work; None if a signal has come, or comes and interrupts it."""
        try:
            self._interruptible = True
            return work() if self.caught is None else None
        except KeyboardInterrupt:
            if self.caught is None:
                raise
            return None
        finally:
            self._interruptible = False

    def exit(self, done: int) -> NoReturn:
        """End the run in all processes, once the checkpoint is on the disk."""
        distributed.barrier()  # until the first has written: a launcher ends all processes when one has ended
        if distributed.is_main():
            reason = "another process was told to stop" if self.caught is None else self.caught.name
            print(
                f"{reason}: ended after step {done}, which is saved; the same command resumes from it", file=sys.stderr
            )
        raise Stopped(SAVED)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Note the first signal; Python calls this in the main thread, between two of its instructions."""
        self.caught = self.caught or signal.Signals(number)
        if self._interruptible:
            self._interruptible = False
            raise KeyboardInterrupt

    def _listen(self) -> None:
        """Announce the first signal and end the process at the second; runs in a thread until the socket closes."""
        first = None
        while data := self._reader.recv(16):
            for received in (signal.Signals(number) for number in data if number in SIGNALS):
                self.caught = self.caught or received
                if first is None:
                    first = time.monotonic()
                    self.say(f"{received.name}: the run saves after this step and ends; once more ends it at once")
                elif time.monotonic() - first > REPEAT_SECONDS:
                    os.write(2, f"adclr: {received.name} again: ended at once; the last checkpoint is whole\n".encode())
                    os._exit(128 + received)
