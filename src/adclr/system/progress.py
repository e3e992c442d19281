"""Progress of anything long: a live bar on a terminal, elsewhere a plain line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Self, TypeVar

from rich.console import Console
from rich.control import Control
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.segment import ControlType

from adclr.system.text import printable

T = TypeVar("T")
PLAIN_SECONDS = 10.0  # between lines where there is no terminal


def format_duration(seconds: float) -> str:
    """Return a time in the unit that suits it: 45 seconds, 12.3 minutes, 4.6 days."""
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.3g} seconds"


class ProgressLine:
    """Progress towards a known total: `with Line("pretrain", total) as line: line.move(done, "loss 5.1")`."""

    def __init__(self, name: str, total: int, done: int = 0, show: bool = True) -> None:
        self.name, self.total, self.first = name, total, done
        self.console = Console(file=sys.stderr, quiet=not show, highlight=False)
        self.live = self.console.is_terminal and show
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TextColumn("{task.fields[left]}"),  # rich's own uses the last 30 seconds, less than a step can take
            console=self.console,
            disable=not self.live,
            transient=True,
        )
        self.task = self.bar.add_task(name, total=total, completed=done, text="", left="")
        self.started = self.printed = time.monotonic()

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def move(self, done: int, text: str = "") -> None:
        """Show that `done` of the total are done, with a text and the time that is left."""
        now = time.monotonic()
        advanced = done - self.first
        left = f"{format_duration((now - self.started) / advanced * (self.total - done))} left" if advanced else ""
        if self.live:
            self.bar.update(self.task, completed=done, text=escape(printable(text)), left=left)
        elif now - self.printed >= PLAIN_SECONDS or done == self.total:
            self.printed = now
            self.say(" ".join(part for part in (self.name, f"{done}/{self.total}", text, left) if part))

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.bar.console.print(printable(text), markup=False, soft_wrap=True)


class ProgressCount:
    """A count without a known total: `with Tally("indexing", "images") as tally: tally.add(5)`; silent if short."""

    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit, self.count = name, unit, 0
        self.console = Console(file=sys.stderr, highlight=False)
        self.printed = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.console.control(Control((ControlType.CARRIAGE_RETURN,), (ControlType.ERASE_IN_LINE, 2)))

    def add(self, count: int) -> None:
        """Count further items and show the count now and then."""
        self.count += count
        now = time.monotonic()
        if now - self.printed >= (0.2 if self.console.is_terminal else PLAIN_SECONDS):
            self.printed = now
            line = f"{self.name}: {self.count} {self.unit}"
            self.console.print(line, end="\r" if self.console.is_terminal else "\n", markup=False)


def track(items: Iterable[T], name: str, total: int, show: bool = True) -> Iterator[T]:
    """Yield the items and show how many of the total have been done."""
    with ProgressLine(name, total, show=show) as line:
        for done, item in enumerate(items, 1):
            yield item
            line.move(done)
