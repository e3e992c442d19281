"""The parser of the command line, and the types of its arguments. Imports no torch."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from adclr.system.text import printable


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Print the sentence and exit with code 2."""
        print(f"adclr: {printable(message)}; {self.prog} --help says more", file=sys.stderr)
        raise SystemExit(2)


def seed(text: str) -> int:
    """Return a seed, a number from 0 on."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"'{text}' is not a seed; write a number from 0 on")
    return int(text)


def count(text: str) -> int:
    """Return a number from 1 on."""
    if not text.isdecimal() or not 1 <= int(text) <= 10**12:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 on")
    return int(text)


def positive(text: str) -> float:
    """Return a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return number


def attach_value(option: str, arguments: Sequence[str]) -> list[str]:
    """Join an option and its value by '=', so that argparse takes a value that begins with '-'."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] == option:
            joined[-1] = f"{option}={argument}"
        else:
            joined.append(argument)
    return joined


def format_rows(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return names, defaults and meanings in three columns; meanings are wrapped to the width of a terminal."""
    width = max(len(name) for name, _, _ in rows)
    columns = shutil.get_terminal_size((0, 0)).columns  # 0: the output is a file
    room = columns - width - 27
    lines = []
    for name, default, meaning in rows:
        start = f"  {name:<{width}}  {default:<22} "
        parts = textwrap.wrap(meaning, room) if room >= 40 else [meaning]
        lines += [start + parts[0], *(" " * len(start) + part for part in parts[1:])] if parts else [start.rstrip()]
    return "\n".join(lines)
