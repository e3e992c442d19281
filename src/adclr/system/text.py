"""Text from outside (names of files and classes, messages of other programs) made safe to print; sizes with units."""

from __future__ import annotations

import os
import shlex
import unicodedata
from collections.abc import Iterable

JOINERS = "\u200c\u200d"  # zero-width (non-)joiner, without which Persian, Indic scripts and emoji are misspelled


def printable(text: str) -> str:
    """Return the text with everything escaped, as Python writes it, that a terminal would obey instead of show.

    These are control characters (among them escape sequences, newlines and tabs), bidirectional overrides and other
    invisible characters, line separators, and bytes that are not UTF-8. Letters of all scripts and all spaces stay.
    """
    if text.isprintable():
        return text
    return "".join(c if _is_shown(c) else c.encode("unicode_escape").decode("ascii") for c in text)


def _is_shown(character: str) -> bool:
    return character.isprintable() or character in JOINERS or unicodedata.category(character) == "Zs"


def printable_lines(text: str) -> str:
    """Return a text of several lines with each of them made printable."""
    return "\n".join(printable(line) for line in text.split("\n"))


def shell_join(words: Iterable[str]) -> str:
    """Return words as a line that can be shown on a terminal and pasted into a shell.

    A word with characters that a terminal obeys is written as $'...', which bash, zsh and ksh read.
    """
    return " ".join(map(_shell_quote, words))


def _shell_quote(word: str) -> str:
    if printable(word) == word:
        return shlex.quote(word)
    plain = (
        chr(byte) if 32 <= byte < 127 and chr(byte) not in "\\'" else f"\\{byte:03o}" for byte in os.fsencode(word)
    )
    return f"$'{''.join(plain)}'"


def as_utf8(text: str) -> str:
    """Return a name of a file as text that every program can read: bytes that are not UTF-8 become \\udcNN."""
    return text.encode("utf-8", "backslashreplace").decode()


def one_line(error: Exception, length: int = 200) -> str:
    """Return the message of an error in one line of at most so many characters, or its type if there is none."""
    return " ".join(str(error).split())[:length] or type(error).__name__


def format_size(gigabytes: float) -> str:
    """Return a size in the unit that suits it: 1.2 TB, 340 MB."""
    for unit, length in (("TB", 1e3), ("GB", 1.0), ("MB", 1e-3)):
        if gigabytes >= length:
            return f"{gigabytes / length:.3g} {unit}"
    return f"{gigabytes * 1e6:.0f} kB"
