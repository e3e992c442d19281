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
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAVED = 75  # the exit code: EX_TEMPFAIL of sysexits.h, which says "not done, try again later"
# A launcher passes a signal on to processes that may have had it from the system already: within this time it is one.
ONE_SECOND = 1.0


class Stopped(SystemExit):
    """The run was told to stop and what it has learned is on the disk; not caught, it ends the program with code 75."""


class Asked(NamedTuple):
    """What all processes do after a step."""

    stop: bool
    save: bool


class Signals:
    """`with Signals(say) as signals: ... if signals.asked().stop: break`, which all processes ask after every step.

    Signals come in through a thread, so that a second one ends the process even while its first thread waits for a GPU
    or for other processes that do not answer. That is harmless: what is being written bears a temporary name.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.caught: signal.Signals | None = None
        self._interruptible = False
        self._before: dict[signal.Signals, Any] = {}
        self._hosts = distributed.Hosts()
        self._answer: Callable[[], list[bool]] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python lets no other have them
            self._here, there = socket.socketpair()
            there.setblocking(False)
            self._there, self._wakeup = there, signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
            self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
            self._there.close()
            self._thread.join()
            self._here.close()
        if kind is None and self._answer is not None:
            self._answer()  # the others, who are at the same step, have asked too

    def asked(self, overdue: bool = False) -> Asked:
        """Whether to stop now, and whether to save because a process says that this is `overdue`.

        The answer after the same step is the same in every process, and no GPU is waited for: between several
        processes a few bytes travel from host to host while the next step is done, so the answer is of the step before.
        """
        if distributed.world_size() == 1:
            return Asked(self.caught is not None, overdue)
        answer = Asked(False, False) if self._answer is None else Asked(*self._answer())
        self._answer = None
        if not answer.stop:  # what is about to be saved is not asked for once more
            self._answer = self._hosts.ask(self.caught is not None, overdue and not answer.save)
        return answer

    def cut_short(self, work: Callable[[], T]) -> T | None:
        """Does some work that is given up when a signal comes, or has come; None if it was."""
        try:
            self._interruptible = True
            return work() if self.caught is None else None
        except KeyboardInterrupt:
            if self.caught is None:
                raise
            return None
        finally:
            self._interruptible = False

    def stop(self, done: int) -> NoReturn:
        """Ends the run, in all processes, when what was saved is on the disk."""
        distributed.barrier()  # until the first has written, for a launcher ends all when one has ended
        if distributed.is_main():
            reason = "another process was told to stop" if self.caught is None else self.caught.name
            print(
                f"{reason}: ended after step {done}, which is saved; the same command goes on from it", file=sys.stderr
            )
        raise Stopped(SAVED)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """In the first thread, between two of its instructions."""
        self.caught = self.caught or signal.Signals(number)
        if self._interruptible:
            self._interruptible = False
            raise KeyboardInterrupt

    def _listen(self) -> None:
        first = None
        while data := self._here.recv(16):
            for which in (signal.Signals(number) for number in data if number in SIGNALS):
                self.caught = self.caught or which
                if first is None:
                    first = time.monotonic()
                    self.say(f"{which.name}: the run saves after this step and ends; once more ends it at once")
                elif time.monotonic() - first > ONE_SECOND:
                    os.write(2, f"adclr: {which.name} again: ended at once; the last checkpoint is whole\n".encode())
                    os._exit(128 + which)
